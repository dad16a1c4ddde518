"""Every dtype goes through every collective, bit for bit or as torch reduces it."""

import pytest
import torch

import allgrad as ag
import allgrad.errors
import reference
from allgrad._core.reductions import REDUCTIONS, find

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.int32, torch.int16),
    *(torch.uint8, torch.bool, torch.complex64),
)
MOVED_ONLY = (torch.float8_e4m3fn, torch.uint16, torch.complex32)


def whole_numbers(shape, rank, dtype):
    """Small whole numbers: every order of adding or multiplying them gives the same."""
    made = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(rank))
    return made.to(dtype)


def fits(op, dtype):
    try:
        find("", op, dtype)
    except ag.errors.ReductionError:
        return False
    return True


@pytest.mark.one_in(4)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [*DTYPES, *MOVED_ONLY], ids=str)
def test_every_dtype_travels(rank, world, dtype):
    xs = [whole_numbers((r + 1, 2), r, dtype) for r in range(world)]
    alike = [whole_numbers((5, 2), r, dtype) for r in range(world)]
    x, y = xs[rank], alike[rank]

    def bits(t):
        return t.contiguous().view(torch.uint8)

    pairs = [(0, world - 1)]
    cases = {
        "all_gather": (ag.all_gather(x), torch.cat([bits(t) for t in xs])),
        "all_to_all": (
            ag.all_to_all(y),
            reference.all_to_all([bits(t) for t in alike])[rank],
        ),
        "broadcast": (ag.broadcast(y, 1), bits(alike[1])),
        "gather": (ag.gather(x, 1), reference.gather([bits(t) for t in xs], 1)[rank]),
        "permute": (ag.permute(x, pairs), reference.permute([bits(t) for t in xs], pairs)[rank]),
        "shift": (ag.shift(x), bits(xs[rank - 1])),
        "scatter": (
            ag.scatter(y if rank == 0 else None),
            reference.scatter(bits(alike[0]), world)[rank],
        ),
        "split": (ag.split(alike[0]), reference.scatter(bits(alike[0]), world)[rank]),
    }
    for name, (got, want) in cases.items():
        assert got.dtype == dtype, name
        assert torch.equal(bits(got.detach()), want), name
        floats = dtype.is_floating_point or dtype.is_complex
        assert got.requires_grad == floats, name


@pytest.mark.one_in(7)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_every_reduction_of_every_dtype(rank, world, op, dtype):
    if not fits(op, dtype):
        with pytest.raises(ag.errors.ReductionError):
            ag.all_reduce(torch.zeros(1, dtype=dtype), op)
        return
    xs = [whole_numbers((5, 2), r, dtype) for r in range(world)]
    x = xs[rank]
    want = [
        (ag.all_reduce(x, op), reference.all_reduce(xs, op)[rank]),
        (ag.reduce_scatter(x, 0, op), reference.reduce_scatter(xs, 0, op)[rank]),
        (ag.reduce(x, 1, op), reference.reduce(xs, 1, op)[rank]),
        (ag.scan(x, op), reference.scan(xs, op)[rank]),
    ]
    for got, expected in want:
        assert got.dtype == dtype
        assert got.shape == expected.shape
        tolerance = (
            {"rtol": 8e-3, "atol": 8e-3} if op in {"mean", "logsumexp"} else {"rtol": 0, "atol": 0}
        )
        torch.testing.assert_close(got.detach(), expected, **tolerance)


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_is_not_added(dtype):
    """By every rank, before anything is sent: by the caller's sum, and by the sum in a backward."""
    x, name = torch.ones(4).to(dtype), str(dtype).removeprefix("torch.")
    for op in REDUCTIONS:
        with pytest.raises(
            ag.errors.ReductionError, match=f"all_reduce.*{name}.*{op}.*\n.*bfloat16"
        ):
            ag.all_reduce(x, op)
    for call in (ag.all_gather, ag.broadcast, ag.share):
        y = call(x.requires_grad_())
        with pytest.raises(ag.errors.ReductionError, match=f"{name}(.*\n)*.*grad=.none"):
            y.backward(torch.ones_like(y))
        assert not call(x, grad="none").requires_grad


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex32])
def test_what_torch_does_not_reduce_is_refused_with_what_to_reduce(dtype):
    x, name = torch.ones(4).to(dtype), str(dtype).removeprefix("torch.")
    for op in ("sum", "prod", "min", "max"):
        with pytest.raises(
            ag.errors.ReductionError, match=rf"all_reduce.*{name}.*{op}.*\nReduce x"
        ):
            ag.all_reduce(x, op)


@pytest.mark.ranks(2)
def test_complex32_is_not_added():
    x = torch.ones(4, dtype=torch.complex32)
    with pytest.raises(ag.errors.ReductionError, match=r"complex32.*mean.*\n.*complex64"):
        ag.all_reduce(x, "mean")
    for call in (ag.all_gather, ag.share):
        y = call(x.requires_grad_())
        with pytest.raises(ag.errors.ReductionError, match=r"complex32(.*\n)*.*complex64"):
            y.backward(torch.ones_like(y))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("many", [False, True])
def test_mean_of_large_halves(rank, world, many):
    """Their sum is infinite in float16; as torch's mean of the stacked pieces, theirs is not."""
    x = torch.full((3, 2), 40000.0, dtype=torch.float16, requires_grad=True)
    calls = {
        "all_reduce": lambda x: ag.all_reduce(x, "mean"),
        "reduce": lambda x: ag.reduce(x, 0, "mean"),
        "reduce_scatter": lambda x: ag.reduce_scatter(x, op="mean"),
        "scan": lambda x: ag.scan(x, "mean"),
    }
    for name, call in calls.items():
        y = (call([x, x])[1] if many else call(x))[:1]
        want = 0.0 if name == "reduce" and rank else 40000.0
        torch.testing.assert_close(y, torch.full_like(y, want), rtol=1e-3, atol=0, msg=name)
        (g,) = torch.autograd.grad(y, x, torch.full_like(y, 30000.0))
        assert g.dtype == torch.float16
        assert g.isfinite().all(), name
