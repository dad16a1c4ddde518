"""grad_cache_step: the outputs of all micro-batches are one kind, and a mistake of one rank raises on all."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import allgrad as ag
from allgrad._wire import ended_ranks, watchdog
from allgrad.errors import AllgradError, InputError, RankRaised
from allgrad.losses import clip_loss, grad_cache_step
from allgrad.testing import run_ranks
from exactness import random
from refusals import raises_everywhere


class Reordered(nn.Module):
    """Names in another order for each second call."""

    def __init__(self, turn):
        super().__init__()
        torch.manual_seed(3)
        self.image, self.text = (nn.Linear(5, 4).double() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.turn, self.calls = turn, 0

    def forward(self, x):
        named = {"image": self.image(x), "text": self.text(x), "scale": self.scale * 1}
        self.calls += 1
        back = self.turn and self.calls % 2 == 0
        return dict(reversed(named.items())) if back else named


@pytest.mark.parametrize("scalars", [None, ["scale"]])
@pytest.mark.ranks(3)
def test_outputs_are_joined_by_name(rank, world, scalars):
    # Of ranks with fewer micro-batches some calls have no trace: each order meets each forward.
    sizes = ((2, 3, 1), (4, 2), (3,))[rank]
    batches = [random((n, 5), 10 * rank + i) for i, n in enumerate(sizes)]
    plain, turned = Reordered(turn=False), Reordered(turn=True)
    want, got = (grad_cache_step(m, batches, clip_loss, scalars=scalars) for m in (plain, turned))
    torch.testing.assert_close(got, want)
    for (name, p), q in zip(turned.named_parameters(), plain.parameters(), strict=True):
        assert p.grad.abs().sum() > 0, name
        torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name: f"{n}: {m}")


def by_call(*outputs):
    """An encoder that returns another kind of output in each call."""
    made = iter(outputs)
    return lambda x: next(made)(x)  # noqa: PLW0108 - one of them in each call


def pair(x):
    return x, x.cos()


def named(x):
    return {"image": x, "text": x.cos()}


def others(x):
    return {"image": x, "words": x.cos()}


def narrow(x):
    return x[:, :3], x[:, :3]


def deep(x):
    return {"image": x, "text": x[..., None]}


def elsewhere(x):
    return x, x.to("meta")


def unlike(*outputs):
    return lambda step: step(encode=by_call(*outputs))


def vector(x, y):
    return clip_loss(x, y, 1.0) * torch.ones(2)


MISTAKES = {
    "there is no output 'bias'": lambda step: step(scalars=["bias"]),
    "scalars is int": lambda step: step(scalars=3),
    "scalars is str": lambda step: step(scalars="scale"),
    "scalars is generator": lambda step: step(scalars=(i for i in (1,))),
    "3 outputs for one micro-batch, 2 outputs for the first": unlike(pair, lambda x: (*pair(x), x)),
    "1 output for one micro-batch, 2 outputs for the first": unlike(pair, lambda x: x),
    "2 outputs for one micro-batch, 'image', 'text' for the first": unlike(named, pair),
    "'image', 'words' for one micro-batch, 'image', 'text' for the first": unlike(named, others),
    "output 0 of encode is (2, 3) on cpu for one micro-batch, (2, 4) on cpu": unlike(pair, narrow),
    "output 'text' of encode is (2, 4, 1)": unlike(named, deep),
    "output 1 of encode is (2, 4) on meta for one": unlike(pair, elsewhere),
    "output 1 of encode has no rows to join": unlike(pair, lambda x: (x, x.sum())),
    "loss returned a tensor of shape (2,)": lambda step: step(loss=vector),
}


@pytest.mark.parametrize("text", MISTAKES)
@pytest.mark.ranks(3)
def test_in_checked_mode_a_mistake_of_one_rank_raises_on_all(rank, world, text):
    weight = torch.ones((), requires_grad=True)
    batches = [random((2, 4), 10 * rank + i) for i in range(2)]

    def step(encode=pair, micro_batches=batches, loss=lambda x, y: clip_loss(x, y, 1.0), **options):
        return grad_cache_step(lambda x: encode(x * weight), micro_batches, loss, **options)

    def run():
        step() if rank != 1 else MISTAKES[text](step)

    with ag.checked(sites=False):
        error = InputError if rank == 1 else RankRaised
        raises_everywhere(error, run, "grad_cache_step: ", text)


def other_width():
    rank = dist.get_rank()
    group = dist.new_group()
    watchdog._LOOK_EVERY, ended_ranks._GRACE = 0.05, 0.3
    ag.all_reduce(torch.ones(1))
    time.sleep(1)  # the last look of the usual kind
    weight = torch.ones((), requires_grad=True)
    encode = by_call(*[pair, narrow if rank == 1 else pair] * 2)
    with pytest.raises(AllgradError) as caught:
        grad_cache_step(
            lambda x: encode(x * weight),
            [random((2, 4), rank), random((3, 4), rank)],
            lambda x, y: clip_loss(x, y, 1.0, group=group),
            group=group,
        )
    dist.barrier()  # no rank closes its connections before
    dist.destroy_process_group()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.timeout(60)
def test_a_rank_with_embeddings_of_another_width_keeps_nobody_waiting():
    for rank, text in enumerate(run_ranks(other_width, 3, timeout=40)):
        assert "output 0 of encode is (3, 3) on cpu for one micro-batch, (2, 4)" in text, text
        assert text.startswith("InputError" if rank == 1 else "RankRaised"), text


def test_other_outputs_when_it_encodes_again_are_refused():
    encode = by_call(pair, pair, pair, lambda x: (*pair(x), x))
    xs = [random((2, 4), i) for i in range(2)]
    with pytest.raises(InputError, match="3 outputs for one micro-batch, 2 outputs for the first"):
        grad_cache_step(encode, xs, lambda x, y: clip_loss(x, y, 1.0))


def test_a_backward_of_its_own_may_take_a_loss_of_many_numbers():
    weight = torch.ones((), requires_grad=True)
    xs = [random((2, 4), 1), random((3, 4), 2)]
    encode = lambda x: pair(x * weight)  # noqa: E731
    got = grad_cache_step(encode, xs, vector, backward=lambda value: value.sum().backward())
    assert got.shape == (2,)
    by_two, weight.grad = weight.grad, None
    grad_cache_step(encode, xs, lambda x, y: clip_loss(x, y, 1.0))
    torch.testing.assert_close(by_two, 2 * weight.grad)
