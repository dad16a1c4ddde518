"""grad_cache_step against the one big batch, with dropout replayed and one synchronisation."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import allgrad as ag
from allgrad.errors import InputError
from allgrad.losses import (
    ClipLoss,
    KeyQueue,
    clip_loss,
    grad_cache_step,
    info_nce_loss,
    multiple_negatives_loss,
    reference,
)
from exactness import random
from refusals import raises_everywhere

NEAR = {"rtol": 1e-10, "atol": 1e-13}


class Towers(nn.Module):
    """Two encoders and a learned scale, which forward returns too, as CLIP models do."""

    def __init__(self, dropout=0.0, named=False):
        super().__init__()
        torch.manual_seed(11)
        self.image = nn.Sequential(nn.Linear(5, 9), nn.Dropout(dropout), nn.Tanh(), nn.Linear(9, 4))
        self.text = nn.Linear(6, 4)
        self.log_scale = nn.Parameter(torch.tensor(1.5))
        self.named = named
        self.double()

    def forward(self, pair):
        out = (
            normalize(self.image(pair[0]), dim=1),
            normalize(self.text(pair[1]), dim=1),
            self.log_scale.exp(),
        )
        return dict(zip(("image", "text", "scale"), out, strict=True)) if self.named else out


def pairs(counts, rank):
    """Micro-batches of one rank."""
    return [
        (random((n, 5), 70 + 10 * rank + i), random((n, 6), 170 + 10 * rank + i))
        for i, n in enumerate(counts)
    ]


def joined(batches):
    return tuple(torch.cat(side) for side in zip(*batches, strict=True))


def same_gradients(got, want):
    for (name, p), q in zip(got.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **NEAR, msg=lambda m, n=name: f"{n}: {m}")


COUNTS = ((3, 2, 1), (4,), (0, 5))


@pytest.mark.ranks(3)
def test_equals_the_one_big_batch_under_ddp(rank, world):
    alone = Towers()
    everything = joined([b for r in range(world) for b in pairs(COUNTS[r], r)])
    want = reference.clip(*alone(everything))
    want.backward()

    model = Towers(named=True)
    wrapped = DistributedDataParallel(model)
    syncs = []

    def count(state, bucket):
        syncs.append(bucket.index())
        return allreduce_hook(None, bucket)

    wrapped.register_comm_hook(None, count)
    for step in range(2):
        model.zero_grad()
        got = grad_cache_step(wrapped, pairs(COUNTS[rank], rank), clip_loss)
        assert not got.requires_grad
        torch.testing.assert_close(got, want.detach(), **NEAR)
        same_gradients(model, alone)
        assert sorted(set(syncs)) == list(range(len(syncs) // (step + 1))), (
            "more than one each step"
        )


@pytest.mark.parametrize("look_for_unused", [False, True])
@pytest.mark.ranks(2)
def test_parameters_that_only_the_loss_uses_are_synchronised_by_ddp(rank, world, look_for_unused):
    """As in models of open_clip's kind: the scale is read from the module, whether it is returned or not."""
    counts = COUNTS[:world]
    model = Towers(named=True)
    wrapped = DistributedDataParallel(model, find_unused_parameters=look_for_unused)
    alone = Towers()
    # A hook of the caller's runs on each part of a gradient. DDP that looks for unused ones may give it None.
    for each in (model, alone) if not look_for_unused else ():
        each.log_scale.register_hook(lambda g: g / 2)
        each.text.weight.register_hook(lambda g: 2 * g)
    for step in range(3):
        everything = joined([b for r in range(world) for b in pairs(counts[r], r + 10 * step)])
        penalty = alone.text.weight.square().sum()  # of a parameter that the encoder uses too
        want = reference.clip(*alone(everything)[:2], alone.log_scale.exp()) + penalty
        alone.zero_grad()
        want.backward()

        def loss(image, text, scale):
            del scale
            found = clip_loss(image, text, model.log_scale.exp())
            return found + model.text.weight.square().sum()

        model.zero_grad()
        got = grad_cache_step(wrapped, pairs(counts[rank], rank + 10 * step), loss)
        torch.testing.assert_close(got, want.detach(), **NEAR)
        same_gradients(model, alone)
        for each in (model, alone):
            with torch.no_grad():
                for p in each.parameters():
                    p.sub_(0.1 * p.grad)


@pytest.mark.ranks(2)
def test_a_ddp_module_that_only_the_loss_calls(rank, world):
    def made():
        torch.manual_seed(3)
        return nn.Linear(5, 4).double(), nn.Linear(4, 4).double()

    batches = [[random((2, 5), 10 * r + i) for i in range(2)] for r in range(world)]
    keys = random((4 * world, 4), 90)
    encoder, head = made()
    want = reference.info_nce(head(encoder(torch.cat([x for b in batches for x in b]))), keys, 3.0)
    want.backward()
    models = made()
    wrapped = [DistributedDataParallel(each) for each in models]
    own = keys.chunk(world)[rank]
    for _ in range(2):
        for each in models:
            each.zero_grad()
        loss = lambda x: info_nce_loss(wrapped[1](x), own, 3.0)  # noqa: E731
        grad_cache_step(wrapped[0], batches[rank], loss, models=wrapped[1])
        for got, alone in zip(models, (encoder, head), strict=True):
            same_gradients(got, alone)


@pytest.mark.ranks(2)
def test_what_ddp_or_grad_mode_makes_impossible_raises(rank, world):
    wrapped = DistributedDataParallel(Towers(), static_graph=True)
    call = partial(grad_cache_step, wrapped, pairs((2, 1)[: 2 - rank], rank), clip_loss)
    raises_everywhere(InputError, call, "static_graph=True")
    with torch.no_grad():
        call = partial(grad_cache_step, Towers(), pairs((2,), rank), clip_loss)
        raises_everywhere(InputError, call, "grad mode is off")


class Step(nn.Module):
    """A module whose forward is the step, as the DDP module of a trainer calls it."""

    def __init__(self):
        super().__init__()
        self.towers = Towers()

    def forward(self, step):
        return step(self.towers)


@pytest.mark.ranks(2)
def test_inside_the_forward_of_ddp_the_caller_averages(rank, world):
    own, model = pairs(COUNTS[rank], rank), DistributedDataParallel(Step())
    step = partial(grad_cache_step, micro_batches=own, loss=clip_loss)
    for models in ((), model):
        call = partial(model, partial(step, models=models))
        raises_everywhere(InputError, call, "inside the forward of a DDP module", "no_sync()")

    def unsynchronised(towers):
        with model.no_sync():
            return step(towers)

    model(unsynchronised)
    averaged = ag.all_reduce([p.grad for p in model.parameters()], "mean", grad="none")
    alone = Towers()
    reference.clip(
        *alone(joined([b for r in range(world) for b in pairs(COUNTS[r], r)]))
    ).backward()
    for got, p in zip(averaged, alone.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad, **NEAR)


def without_graph(how):
    model = Towers()
    if how == "detach":
        return model, lambda pair: [x.detach() for x in model(pair)]
    return model, (torch.no_grad if how == "no_grad" else torch.inference_mode)()(model)


@pytest.mark.ranks(3)
def test_a_rank_without_rows_may_return_what_needs_no_gradient(rank, world):
    model, batches = Towers(), pairs(((0,), (4,), (2, 1))[rank], rank)

    def encode(pair):
        if len(pair[0]):
            return model(pair)[:2]
        return torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, 4, dtype=torch.float64)

    value = grad_cache_step(encode, batches, partial(clip_loss, scale=3.0), models=model)
    torch.testing.assert_close(ag.all_gather(value[None]), value.expand(world))
    assert all((p.grad is None) == (rank == 0) for p in model.image.parameters())


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "detach"])
@pytest.mark.ranks(2)
def test_an_encoder_without_a_graph_is_refused(rank, world, how):
    model, encode = without_graph(how)
    call = partial(grad_cache_step, encode, pairs(COUNTS[rank], rank), clip_loss, models=model)
    raises_everywhere(InputError, call, "no output of encode requires grad")
    # The loss may have parameters of its own.
    head = nn.Linear(4, 4).double()

    def loss(image, text, scale):
        return clip_loss(head(image), text, scale)

    grad_cache_step(encode, pairs(COUNTS[rank], rank), loss, models=model)
    assert head.weight.grad.abs().sum() > 0


def test_dropout_is_replayed_and_random_numbers_are_drawn_once():
    batches = pairs((4, 3, 2), 0)
    plain = Towers(dropout=0.5)
    torch.manual_seed(5)
    outputs = [plain(b) for b in batches]
    features = [torch.cat([o[i] for o in outputs]) for i in range(2)]
    clip_loss(*features, outputs[-1][2]).backward()
    after = torch.rand(3)

    model = Towers(dropout=0.5)
    torch.manual_seed(5)
    grad_cache_step(model, batches, clip_loss)
    same_gradients(model, plain)
    assert torch.equal(torch.rand(3), after)


def test_backward_may_scale_the_loss():
    plain, model = Towers(), Towers()
    (8 * clip_loss(*plain(joined(pairs((4, 3), 0))))).backward()
    grad_cache_step(model, pairs((4, 3), 0), clip_loss, backward=lambda loss: (8 * loss).backward())
    same_gradients(model, plain)


def test_an_encoder_of_one_tensor_and_a_scale_of_the_loss():
    encoder = nn.Linear(5, 4).double()
    key = random((7, 4), 3)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    x = random((7, 5), 1)

    def loss(query):
        return clip_loss(query, key, scale)

    loss(encoder(x)).backward()
    want = [p.grad.clone() for p in (*encoder.parameters(), scale)]
    encoder.zero_grad()
    scale.grad = None
    grad_cache_step(encoder, x.split(3), loss)
    for p, q in zip((*encoder.parameters(), scale), want, strict=True):
        torch.testing.assert_close(p.grad, q, **NEAR)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("counts", [(3, 2), (1, 4), (2, 1, 0), (1,)])
def test_scale_of_one_element_is_not_joined(shape, counts):
    class Shaped(Towers):
        def forward(self, pair):
            image, text, scale = super().forward(pair)
            return image, text, scale.reshape(shape)

    plain, model = Towers(), Shaped()
    want = clip_loss(*plain(joined(pairs(counts, 0))))
    want.backward()
    got = grad_cache_step(model, pairs(counts, 0), clip_loss)
    torch.testing.assert_close(got, want.detach(), **NEAR)
    same_gradients(model, plain)


def test_values_of_single_rows_are_joined():
    """Shape (1,) in every micro-batch, but a value of each row: the embeddings have one row too."""
    encoder = nn.Linear(5, 4).double()
    x = random((3, 5), 1)

    def encode(batch):
        return encoder(batch), batch[:, 0]

    def loss(embedding, value):
        assert value.shape == (3,)
        return (embedding.sum(1) * value).sum()

    loss(*encode(x)).backward()
    want = encoder.weight.grad.clone()
    encoder.zero_grad()
    grad_cache_step(encode, x.split(1), loss)
    torch.testing.assert_close(encoder.weight.grad, want, **NEAR)


def test_weights_have_gradients_under_autocast():
    encoder = nn.Linear(5, 4)
    x = torch.randn(6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        grad_cache_step(encoder, x.split(2), lambda q: q.float().square().sum())
    assert encoder.weight.grad.abs().sum() > 0


@pytest.mark.ranks(3)
def test_rank_without_a_micro_batch_raises_on_all(rank, world):
    model = Towers()
    with pytest.raises(InputError, match="rank 1: 0 micro-batches   <- no micro-batch") as raised:
        grad_cache_step(model, pairs(((2, 1), (), (3,))[rank], rank), clip_loss)
    assert "rank 0: 2 micro-batches\n" in str(raised.value)
    assert all(p.grad is None for p in model.parameters())
    grad_cache_step(model, pairs(COUNTS[rank], rank), clip_loss)  # the group is still usable
    assert model.log_scale.grad is not None


@pytest.mark.ranks(3)
def test_ranks_outside_the_group_take_no_part(rank, world):
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    member = rank // 2
    alone, model = Towers(), Towers()
    counts = ((2, 1), (3,))
    reference.clip(*alone(joined([b for r in range(2) for b in pairs(counts[r], r)]))).backward()
    loss = ClipLoss(group=group, grad_reduction="sum")
    grad_cache_step(model, pairs(counts[member], member), loss, group=group)
    for p in model.parameters():
        p.grad = ag.all_reduce(p.grad, group=group)
    same_gradients(model, alone)


class Normed(Towers):
    """With statistics that move in each forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, pair):
        image, text, scale = super().forward(pair)
        return self.norm(image), text, scale


@pytest.mark.ranks(2)
def test_statistics_of_batch_norm_move_once(rank, world):
    """Also on a rank that encodes a micro-batch again because another one has more."""
    batches = pairs(((3, 2, 4), (5,))[rank], rank)
    plain, model = Normed(), Normed()
    for batch in batches:
        plain(batch)
    grad_cache_step(model, batches, clip_loss)
    assert model.norm.num_batches_tracked.item() == len(batches)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean, **NEAR)
    torch.testing.assert_close(model.norm.running_var, plain.norm.running_var, **NEAR)


class Counting(Towers):
    """With buffers that the first forward makes, and one that none changes, of one number in memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", None)
        self.register_buffer("ones", torch.ones(1, dtype=torch.float64).expand(4))

    def forward(self, pair):
        image, text, scale = super().forward(pair)
        if self.calls is None:
            self.register_buffer("rows", torch.zeros(()))
        self.calls = torch.ones(()) if self.calls is None else self.calls + 1
        self.rows += len(image)
        return image * self.ones, text, scale


@pytest.mark.ranks(2)
def test_buffers_that_the_first_forward_makes_count_once(rank, world):
    counts = ((3, 2, 4), (5,))[rank]
    model = Counting()
    grad_cache_step(model, pairs(counts, rank), clip_loss)
    assert (model.calls, model.rows) == (len(counts), sum(counts))


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_buffers_that_no_forward_changes_are_left_alone(mode):
    """Another graph may need them in backward, and some cannot be written to."""
    model = Towers()
    with mode():
        for name, buffer in (("ones", torch.ones(4)), ("two", torch.tensor([2.0]).expand(4))):
            model.register_buffer(name, buffer.double())
    given = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    other = sum((given * b.clone() * b for b in model.buffers() if not b.is_inference()), given)
    grad_cache_step(model, pairs((2, 1), 0), clip_loss)
    other.sum().backward()
    assert given.grad.unique().tolist() == ([1.0] if mode is torch.inference_mode else [6.0])


@pytest.mark.ranks(2)
def test_what_the_loss_does_to_buffers_stays(rank, world):
    model = Normed()
    model.queue = KeyQueue(64, 4, dtype=torch.float64)
    counts = ((3, 2, 4), (5,))

    def loss(image, text, scale):
        value = multiple_negatives_loss(image, text, scale, queue=model.queue)
        model.queue.push(text)
        return value

    for step in (1, 2):
        grad_cache_step(model, pairs(counts[rank], rank), loss)
        assert model.queue.count.item() == step * sum(map(sum, counts))
    assert model.norm.num_batches_tracked.item() == 2 * len(counts[rank])


class WithVectorScale(Towers):
    """FSDP shards no parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))


@pytest.mark.ranks(3)
def test_unequal_numbers_of_micro_batches_under_fsdp(rank, world):
    alone = WithVectorScale()
    want = reference.clip(*alone(joined([b for r in range(world) for b in pairs(COUNTS[r], r)])))
    want.backward()
    model = WithVectorScale()
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model.image, model.text):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(rank)
    got = grad_cache_step(model, pairs(COUNTS[rank], rank), clip_loss)
    after = torch.rand(1)
    torch.manual_seed(rank)
    assert torch.equal(torch.rand(1), after)  # an encoding without a trace draws no numbers
    torch.testing.assert_close(got, want.detach(), **NEAR)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad.full_tensor(), q.grad, **NEAR, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.ranks(2)
def test_gradients_accumulate_over_steps_and_are_synchronised_in_the_last(rank, world):
    alone = Towers()
    counts = ((3, 2), (4,))
    for step in range(2):
        everything = [b for r in range(world) for b in pairs(counts[r], r + 2 * step)]
        reference.clip(*alone(joined(everything))).backward()
    model = Towers()
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        grad_cache_step(wrapped, pairs(counts[rank], rank), clip_loss)
    grad_cache_step(wrapped, pairs(counts[rank], rank + 2), clip_loss)
    same_gradients(model, alone)


@pytest.mark.parametrize("named", [False, True])
def test_scalars_may_be_named(named):
    """Single rows and a scale of shape (1,) cannot be told apart otherwise."""

    class Shaped(Towers):
        def forward(self, pair):
            image, text, scale = super().forward(pair)
            out = image, text, scale.reshape(1)
            return dict(zip(("image", "text", "scale"), out, strict=True)) if named else out

    plain, model = Towers(), Shaped()
    clip_loss(*plain(joined(pairs((1, 1, 1), 0)))).backward()
    which = ["scale"] if named else [2]
    grad_cache_step(model, pairs((1, 1, 1), 0), clip_loss, scalars=which)
    same_gradients(model, plain)
    with pytest.raises(InputError, match="no output 'bias'"):
        grad_cache_step(model, pairs((1, 1), 0), clip_loss, scalars=["bias"])


@pytest.mark.parametrize("given", ["nothing", "a dict", "an int", "an iterator that fails"])
@pytest.mark.ranks(3)
def test_what_are_no_micro_batches_on_a_rank_raises_on_all(rank, world, given):
    """At once; and the next step is the same one on all ranks."""
    model, batches = Towers(), pairs((2, 1), rank)
    bad = {
        "nothing": None,
        "a dict": {"image": 1},
        "an int": 3,
        "an iterator that fails": (1 / x for x in (1, 0)),
    }[given]
    if rank == 1:
        with pytest.raises((InputError, ZeroDivisionError), match=r"micro_batches is a|division"):
            grad_cache_step(model, bad, clip_loss)
    else:
        with pytest.raises(InputError, match=r"rank 1: 0 micro-batches +<- no micro-batch"):
            grad_cache_step(model, batches, clip_loss)
    value = grad_cache_step(model, batches, clip_loss)
    torch.testing.assert_close(ag.all_gather(value[None]), value.expand(world))


def test_a_batch_in_place_of_batches_is_refused():
    batch = dict(zip(("image", "text"), pairs((2,), 0)[0], strict=True))
    with pytest.raises(InputError, match="micro_batches is a dict"):
        grad_cache_step(Towers(), batch, clip_loss)


def test_no_micro_batch_is_refused():
    with pytest.raises(InputError, match="no micro-batch"):
        grad_cache_step(nn.Identity(), [], clip_loss)


def test_an_iterator_one_module_and_a_number_are_taken():
    encoder, xs = nn.Linear(4, 4).double(), random((5, 4), 1).split((2, 3))
    step = lambda x: (encoder(x), encoder(x).cos(), 3.0)  # noqa: E731
    want = clip_loss(*(torch.cat(x) for x in zip(*(step(x)[:2] for x in xs), strict=True)), 3.0)
    want.backward()
    by_weight, encoder.weight.grad = encoder.weight.grad, None
    got = grad_cache_step(step, (x for x in xs), clip_loss, models=encoder)
    torch.testing.assert_close(got, want.detach())
    torch.testing.assert_close(encoder.weight.grad, by_weight)


@pytest.mark.ranks(3)
def test_outputs_that_are_no_tensors_are_refused(rank, world):
    xs = [torch.ones(2, 4)]
    wrong = {
        "output 1 of encode is NoneType": (lambda x: (x, None), clip_loss),
        "output 'text' of encode is str": (lambda x: {"image": x, "text": "a"}, clip_loss),
        "encode returned object": (lambda _: object(), clip_loss),
        "loss returned dict": (lambda x: x, lambda x: {"loss": clip_loss(x, x, 1.0)}),
    }
    for text, (encode, loss) in wrong.items():
        raises_everywhere(InputError, lambda e=encode, f=loss: grad_cache_step(e, xs, f), text)
