"""SyncBatchNorm: torch's batch norm on the joined batch."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import allgrad as ag
from allgrad.errors import InputError, TensorError
from allgrad.nn import SyncBatchNorm, convert, minibatch_stddev
from counting import Counted
from exactness import leaf, loss, place, random
from nn.twins import LENGTHS, assign, check_twin, close, derivatives, each, pieces_of
from places import everywhere, on

SHAPES = {1: (0, 3), 2: (0, 3, 2, 2), 3: (0, 2, 1, 2, 3)}
PLAIN = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def without_bias(options):
    return {name: value for name, value in options.items() if name != "bias"}


def both(dims, group, **options):
    """The layer and its twin, in one state."""
    channels = SHAPES[dims][1]
    plain = PLAIN[dims](channels, dtype=torch.float64, **without_bias(options))
    if not options.get("bias", True):  # an argument of torch from 2.13 on
        plain.bias = None
    with torch.no_grad():
        for seed, value in enumerate(plain.state_dict().values()):
            if value.is_floating_point():
                value.copy_(random(value.shape, 900 + seed).abs() + 0.5)
    ours = SyncBatchNorm(channels, dtype=torch.float64, group=group, **options)
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def normalise(group, kind, dims, options):
    _, world = place(group)
    ours, plain = both(dims, group, **options)
    names = [name for name, _ in plain.named_parameters()]
    inputs = [(3 * x + 5,) for x in pieces_of(world, kind, SHAPES[dims], 0)]

    def run(xs, ps):
        return assign(ours, names, ps)(*xs)

    def whole(everyone, ps):
        joined = assign(plain, names, ps)(torch.cat([xs[0] for xs in everyone]))
        return joined.split(LENGTHS[kind][:world])

    # First derivatives alone, and those that are differentiated in turn, are computed in two ways.
    for orders in (1, 2):
        check_twin(run, whole, inputs, list(plain.parameters()), group=group, orders=orders)
    for key, value in plain.state_dict().items():
        close(ours.state_dict()[key], value, key)


@pytest.mark.one_in(4)
@everywhere
def test_exact_everywhere(where):
    on(where, each, normalise, [(kind, 2, {}) for kind in LENGTHS])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dims", PLAIN)
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"affine": False, "eps": 0.1},
        {"bias": False},
        {"track_running_stats": False},
        {"momentum": 0.7},
    ],
    ids=str,
)
def test_exact_with_every_option(dims, options):
    on("3 ranks", normalise, "empty", dims, options)


def test_a_norm_without_bias_has_torchs_parameters():
    ours, plain = both(1, None, bias=False)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in ours.named_parameters()] == ["weight"]
    ours.reset_parameters()
    assert ours.weight.tolist() == [1, 1, 1]
    assert ours.bias is None
    for made in (convert(plain), copy.deepcopy(ours)):
        assert made.bias is None
    assert SyncBatchNorm(3, affine=False, bias=False).weight is None
    x = leaf(random((4, 3), 1))
    close(both(1, None, bias=False)[0].eval()(x), both(1, None, bias=False)[1].eval()(x), "eval")


@pytest.mark.ranks(2)
def test_any_layout_in_memory(rank, world):
    """Channels last and slices, and gradients that are expanded, transposed or in a batch."""
    ours, plain = both(2, None)
    wide = pieces_of(world, "ragged", (0, 3, 2, 4), 0)
    everyone = [leaf(p) for p in wide]
    joined = plain(torch.cat([p[..., ::2] for p in everyone]))
    wanted = derivatives(joined.sin().sum() + joined.mT.tanh().sum(), everyone)[rank]
    for layout in (torch.contiguous_format, torch.channels_last):
        x = leaf(wide[rank].contiguous(memory_format=layout))
        y = ours(x[..., ::2].contiguous(memory_format=layout))
        loss_of_rank = y.sin().sum() + y.mT.tanh().sum()
        close(derivatives(loss_of_rank, [x])[0], wanted, "the gradient")
    x = leaf(wide[rank])
    y = ours(x[..., ::2])
    (expanded,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    close(expanded, torch.zeros_like(expanded), "the gradient of a sum of normalised values")
    weights = random((2, *y.shape), 5 + rank)
    (batch,) = torch.autograd.grad(y, x, weights, is_grads_batched=True, retain_graph=True)
    for row, weight in zip(batch, weights, strict=True):
        close(row, torch.autograd.grad(y, x, weight, retain_graph=True)[0], "one of a batch")


@pytest.mark.ranks(2)
def test_parameters_of_another_dtype(rank, world):
    ours, plain = both(2, None)
    x = pieces_of(world, "ragged", SHAPES[2], 0)
    plain(torch.cat(x)).sin().sum().backward()
    ours.float()(x[rank]).sin().sum().backward()
    for got, want in zip(ours.parameters(), plain.parameters(), strict=True):
        assert got.grad.dtype == torch.float32
        torch.testing.assert_close(ag.all_reduce(got.grad), want.grad.float())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.ranks(2)
def test_under_autocast_as_without(rank, world, compiled):
    x = [3 * p.float() + 50 for p in pieces_of(world, "ragged", SHAPES[2], 0)]
    ours, plain = SyncBatchNorm(3), nn.BatchNorm2d(3)
    everyone, own = [leaf(p) for p in x], leaf(x[rank])
    wanted = plain(torch.cat(everyone))
    run = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run(own)
    parts = wanted.split(LENGTHS["ragged"][:world])
    torch.testing.assert_close(y, parts[rank], rtol=0, atol=2e-4)
    torch.testing.assert_close(ours.running_mean, plain.running_mean)
    (got,) = derivatives(loss(y, rank), [own])
    want = derivatives(sum(map(loss, parts, range(world))), everyone)[rank]
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4)


def test_a_constant_channel_is_its_own_mean():
    """Whatever the mean of large numbers is rounded to."""
    x = torch.full((1000, 1), 1e6 + 0.3)
    assert SyncBatchNorm(1)(x).abs().max() == 0


@pytest.mark.ranks(3)
def test_running_statistics_follow_several_batches(rank, world):
    for momentum in (0.3, None):
        ours, plain = both(2, None, momentum=momentum)
        for step, kind in enumerate(LENGTHS):
            x = pieces_of(world, kind, SHAPES[2], 0, step)
            ours(x[rank])
            plain(torch.cat(x))
        for key, value in plain.state_dict().items():
            close(ours.state_dict()[key], value, key)


@pytest.mark.ranks(3)
def test_batch_without_samples_changes_no_statistics(rank, world):
    ours, _ = both(2, None)
    before = {k: v.clone() for k, v in ours.state_dict().items()}
    assert ours(torch.zeros(0, 3, 2, 2, dtype=torch.float64)).shape == (0, 3, 2, 2)
    for key, value in before.items():
        close(ours.state_dict()[key], value, key)
    ours(torch.full((int(rank == 1), 3, 1, 1), 7.0, dtype=torch.float64))
    close(ours.running_var, before["running_var"], "the variance of one value")


@pytest.mark.ranks(3)
def test_large_mean_keeps_the_variance(rank, world):
    x = [p.float() + 1e4 for p in pieces_of(world, "ragged", SHAPES[2], 0)]
    ours = SyncBatchNorm(3)
    y = ours(x[rank])
    wide = torch.cat(x).double()
    want = nn.BatchNorm2d(3, dtype=torch.float64)(wide).split(LENGTHS["ragged"][:world])[rank]
    torch.testing.assert_close(y.double(), want, rtol=0, atol=2e-3)


@pytest.mark.ranks(2)
def test_half_precision_keeps_float_statistics(rank, world):
    x = [p.bfloat16() for p in pieces_of(world, "ragged", SHAPES[2], 0)]
    ours, plain = SyncBatchNorm(3), nn.BatchNorm2d(3)
    y, want = ours(x[rank]), plain(torch.cat(x).float())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(ours.running_var, plain.running_var)
    torch.testing.assert_close(
        y.float(), want.split(LENGTHS["ragged"][:world])[rank], rtol=1e-2, atol=1e-2
    )


@pytest.mark.ranks(3)
def test_eval_is_local(rank, world):
    ours, plain = both(2, None)
    ours.eval()
    plain.eval()
    x = random((2, 3, 2, 2), rank)
    with Counted() as calls:
        close(ours(x), plain(x), "the output")
    assert calls == []


@pytest.mark.ranks(3)
def test_one_message_each_way(rank, world):
    ours, _ = both(2, None)
    x = leaf(pieces_of(world, "empty", SHAPES[2], 0)[rank])
    with Counted() as calls:
        y = ours(x)
        assert calls == ["all_gather"]
        y.sum().backward()
        assert calls == ["all_gather", "reduce_scatter"]


@pytest.mark.ranks(3)
def test_gradient_penalty(rank, world):
    """R1: the squared gradient of the critic by its input is part of the loss."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Softplus(), nn.Flatten(), nn.Linear(16, 1)
    ).double()
    ours = nn.Sequential(*plain[:1], *convert(nn.Sequential(*plain[1:])))
    x = pieces_of(world, "empty", (0, 2, 4, 4), 0)

    def critic_loss(net, x):
        x = leaf(x)
        score = net(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.square().sum() + 5 * slope.square().sum()

    want = derivatives(critic_loss(plain, torch.cat(x)), list(plain.parameters()))
    got = derivatives(critic_loss(ours, x[rank]), list(ours.parameters()))
    for a, b in zip(got, want, strict=True):
        close(ag.all_reduce(a), b, "the gradient with a penalty")


@pytest.mark.ranks(2)
def test_convert_takes_over_parameters_and_state(rank, world):
    plain = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.BatchNorm2d(3).eval())
    )
    norms = list(plain[1])
    keys, values = list(plain.state_dict()), [v.data_ptr() for v in plain.state_dict().values()]
    ours = convert(plain)
    assert ours is plain
    assert all(isinstance(norm, SyncBatchNorm) for norm in ours[1])
    assert list(ours.state_dict()) == keys
    assert [v.data_ptr() for v in ours.state_dict().values()] == values
    for a, b in zip(ours[1], norms, strict=True):
        assert a.weight is b.weight
        assert (a.momentum, a.eps, a.training) == (b.momentum, b.eps, b.training)
    nn.BatchNorm2d(3).load_state_dict(ours[1][1].state_dict())
    nn.SyncBatchNorm(3).load_state_dict(ours[1][1].state_dict())
    assert isinstance(convert(nn.SyncBatchNorm(3), None), SyncBatchNorm)
    bare = convert(nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    assert bare(torch.randn(4, 3)).shape == (4, 3)


@pytest.mark.ranks(3)
def test_convert_of_a_norm_that_is_used_twice(rank, world):
    norm = nn.BatchNorm1d(3).double()
    plain = nn.Sequential(norm, nn.Tanh(), nn.Sequential(norm), norm)
    ours = convert(copy.deepcopy(plain))
    assert ours[0] is ours[2][0] is ours[3]
    x = pieces_of(world, "ragged", SHAPES[1], 0)
    got, want = ours(x[rank]), plain(torch.cat(x)).split(LENGTHS["ragged"][:world])[rank]
    close(got, want, "the output")
    close(ours[0].running_var, norm.running_var, "running_var")


@pytest.mark.ranks(2)
def test_average_of_all_batches_leaves_out_an_empty_one(rank, world):
    ours, plain = both(1, None, momentum=None)
    ours(torch.zeros(0, 3, dtype=torch.float64))
    x = pieces_of(world, "ragged", SHAPES[1], 0)
    ours(x[rank])
    plain(torch.cat(x))
    for key, value in plain.state_dict().items():
        close(ours.state_dict()[key], value, key)


@pytest.mark.parametrize("missing", [["num_batches_tracked"], ["running_mean", "running_var"]])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_buffers_that_were_taken_away(missing, momentum):
    """As with torch's own: statistics of the batch, and no average of all batches."""
    plain = nn.BatchNorm1d(3, momentum=momentum).double()
    for name in missing:
        setattr(plain, name, None)
    ours, x = convert(copy.deepcopy(plain)), random((4, 3), 0)
    close(ours(x), plain(x), "the output")
    for key, value in plain.state_dict().items():
        if key != "num_batches_tracked":  # torch counts what it does not track
            close(ours.state_dict()[key], value, key)


@pytest.mark.ranks(1)
def test_convert_keeps_groups_unless_given_one(rank, world):
    norm = SyncBatchNorm(3)
    assert convert(nn.Sequential(norm))[0] is norm
    assert convert(nn.Sequential(norm), group=dist.group.WORLD)[0] is not norm


class WithReLU(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def test_convert_refuses_what_is_more_than_a_batch_norm():
    module = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(WithReLU(3)))
    with pytest.raises(InputError, match=r"1\.0, a WithReLU, has a forward of its own"):
        convert(module)
    assert type(module[0]) is nn.BatchNorm2d
    computed = torch.nn.utils.parametrize.register_parametrization(
        nn.BatchNorm1d(3), "weight", nn.Identity()
    )
    with pytest.raises(InputError, match="parameters that are computed"):
        convert(computed)
    with pytest.raises(
        InputError, match="the module, a LazyBatchNorm1d, does not know its features"
    ):
        convert(nn.LazyBatchNorm1d())


@pytest.mark.ranks(2)
def test_compiled_without_graph_breaks(rank, world):
    ours, twin = both(2, None)
    x = pieces_of(world, "ragged", SHAPES[2], 0)
    xs = leaf(x[rank])
    y = torch.compile(ours, fullgraph=True, backend="aot_eager")(xs)
    (got,) = derivatives(loss(y, rank), [xs])
    everyone = [leaf(p) for p in x]
    wanted = twin(torch.cat(everyone)).split(LENGTHS["ragged"][:world])
    close(y, wanted[rank], "the output")
    close(got, derivatives(sum(map(loss, wanted, range(world))), everyone)[rank], "the gradient")
    close(ours.running_var, twin.running_var, "running_var")


@pytest.mark.ranks(2)
def test_forward_mode_and_func(rank, world):
    """A directional derivative in both modes, of the loss of all ranks."""
    ours, _ = both(2, None, track_running_stats=False)
    x, t, w = (random((2, 3, 2, 2), seed + rank) for seed in (0, 10, 20))

    def value(x):
        return (w * ours(x).sin()).sum()

    _, forward = torch.func.jvp(value, (x,), (t,))
    backward = (torch.func.grad(value)(x) * t).sum()
    close(ag.all_reduce(forward), ag.all_reduce(backward), "the directional derivative")
    batch = torch.func.vmap(torch.func.grad(value))(torch.stack([x, 2 * x]))
    close(batch[0], torch.func.grad(value)(x), "the gradient in a batch")


def test_wrong_channels_are_told():
    with pytest.raises(TensorError, match=r"not \(N, 3, ...\)"):
        SyncBatchNorm(3)(torch.zeros(2, 4))


def spread(x, channels, eps):
    s = (x.var(0, correction=0) + eps).sqrt()
    s = s.reshape(channels, -1).mean(1).view(1, channels, *[1] * (x.dim() - 2))
    return torch.cat([x, s.expand(len(x), channels, *x.shape[2:])], 1)


def stddev(group, kind, channels):
    _, world = place(group)
    inputs = [(x,) for x in pieces_of(world, kind, (0, 4, 2, 1), 0)]

    def whole(everyone, _):
        joined = spread(torch.cat([xs[0] for xs in everyone]), channels, 1e-8)
        return joined.split(LENGTHS[kind][:world])

    check_twin(
        lambda xs, _: minibatch_stddev(xs[0], channels=channels, group=group),
        whole,
        inputs,
        group=group,
    )


@pytest.mark.one_in(4)
@everywhere
def test_minibatch_stddev_everywhere(where):
    on(where, each, stddev, [(kind, 2 if kind == "ragged" else 1) for kind in LENGTHS])
