# ruff: noqa: ARG004 - forward and backward take a context
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from allgrad.errors import TensorError
from allgrad.testing import (
    GradientMismatch,
    NotAdjoint,
    adjoint_check,
    gradcheck,
    gradgradcheck,
    run_ranks,
)


class AllSum(Function):
    """The sum over ranks, its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return AllSum.apply(g)


class OwnSum(AllSum):
    """The same sum with the gradient of this rank's loss only: wrong."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clone()


class Gather(Function):
    """Pieces of different lengths, joined; the right backward sums, the wrong one keeps its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], right: bool) -> Tensor:
        ctx.sizes, ctx.right = sizes, right
        pieces = [x.new_zeros(size) for size in sizes]
        pieces[dist.get_rank()] = x
        joined = torch.cat(pieces)
        dist.all_reduce(joined)
        return joined

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        g = AllSum.apply(g) if ctx.right else g
        return g.split(ctx.sizes)[dist.get_rank()].clone(), None, None


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)  # seeded by rank


def outcome(check: Any, *args: Any, **kwargs: Any) -> object:
    """What a check said, on each rank."""
    try:
        return check(*args, **kwargs)
    except (GradientMismatch, NotAdjoint, TensorError) as error:
        return f"{type(error).__name__}: {error}"


SIZES = [2, 0, 3]


def test_right_gradients_pass() -> None:
    def body() -> object:
        x = draw(SIZES[dist.get_rank()])
        return outcome(gradcheck, lambda x: Gather.apply(x.exp(), SIZES, True).sin(), x)

    assert run_ranks(body, 3) == [True] * 3


def test_a_wrong_gradient_is_raised_on_every_rank() -> None:
    def body() -> object:
        x = draw(SIZES[dist.get_rank()])
        return outcome(gradcheck, lambda x: Gather.apply(x.exp(), SIZES, False), x)

    said = run_ranks(body, 3)
    assert len(set(said)) == 1
    lines = str(said[0]).splitlines()
    assert lines[0].startswith("GradientMismatch: gradcheck: ")
    assert lines[1].startswith("  rank 0: input 0, element ")
    assert lines[1].endswith("<- wrong")
    assert lines[2] == "  rank 1: nothing requires grad"
    assert lines[3].startswith("  rank 2: input 0, element ")


def test_one_wrong_rank_is_raised_on_every_rank() -> None:
    def body() -> object:
        scale = 2.0 if dist.get_rank() == 2 else 1.0

        def fn(x: Tensor) -> Tensor:
            x.register_hook(lambda g: g * scale)
            return AllSum.apply(x * x)

        return outcome(gradcheck, fn, draw(2))

    said = run_ranks(body, 3)
    assert len(set(said)) == 1
    marked = [line for line in str(said[0]).splitlines() if line.endswith("<- wrong")]
    assert len(marked) == 1
    numbers = marked[0].split()
    analytic, numeric = (
        float(numbers[numbers.index(w) + 1].strip(",")) for w in ("analytic", "numeric")
    )
    assert marked[0].startswith("  rank 2: input 0, element ")
    assert analytic == pytest.approx(2 * numeric, rel=1e-6)


def test_ranks_without_inputs_that_require_grad_take_part() -> None:
    def body() -> object:
        x = draw(3)
        if dist.get_rank() == 1:
            x = x.detach()

        def fn(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
            total = AllSum.apply(x + torch.zeros_like(x).requires_grad_())
            return total * count, count

        return outcome(gradcheck, fn, x, torch.tensor(4))

    assert run_ranks(body, 3) == [True] * 3


@pytest.mark.parametrize("conjugate", [False, True])
def test_complex_gradients_follow_torch(conjugate: bool) -> None:
    def body() -> object:
        weight = torch.tensor(0.5 + 2j, dtype=torch.complex128)

        class Scaled(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return weight * x

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                return g * (weight.conj() if conjugate else weight)

        x = draw(2, 1, dtype=torch.complex128)
        return outcome(gradcheck, lambda x: AllSum.apply(Scaled.apply(x)), x)

    said = run_ranks(body, 3)
    if conjugate:
        assert said == [True] * 3
    else:
        assert len(set(said)) == 1
        assert "re analytic" in str(said[0]) or "im analytic" in str(said[0])


def test_a_gradient_that_is_nan_is_wrong() -> None:
    def fn(x: Tensor) -> Tensor:
        x.register_hook(lambda g: g * torch.nan)
        return x * 1

    assert "analytic nan" in str(outcome(gradcheck, fn, draw(2)))


def test_checks_work_without_a_world() -> None:
    x = draw(2, 3).t()
    assert gradcheck(torch.sin, x)
    assert gradcheck(torch.sin, draw())
    assert gradgradcheck(torch.sin, x)
    assert adjoint_check(lambda x: 3 * x, lambda y: 3 * y, x, draw(3, 2))


def test_checks_work_in_a_group() -> None:
    def body() -> object:
        group = dist.new_group([0, 2])
        if dist.get_rank() == 1:
            return None

        class GroupSum(Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                total = x.detach().clone()
                dist.all_reduce(total, group=group)
                return total

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                return GroupSum.apply(g)

        return outcome(gradcheck, lambda x: GroupSum.apply(x).sin(), draw(2), group=group)

    assert run_ranks(body, 3) == [True, None, True]


def test_a_coarse_dtype_is_refused_on_every_rank() -> None:
    def body() -> object:
        dtype = torch.float32 if dist.get_rank() == 1 else torch.float64
        return outcome(gradcheck, AllSum.apply, draw(2, dtype=dtype))

    for rank, said in enumerate(run_ranks(body, 2)):
        assert f"rank 1: {'float32' if rank else 'coarser inputs'}" in str(said)


def test_second_gradients() -> None:
    def body(kind: type[Function]) -> object:
        return outcome(gradgradcheck, lambda x: kind.apply(x.exp()).sin(), draw(2))

    class WrongTwice(AllSum):
        """The gradient is right, the gradient's gradient is not."""

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return OwnSum.apply(g)

    assert run_ranks(body, 2, AllSum) == [True, True]
    said = run_ranks(body, 2, WrongTwice)
    assert said[0] == said[1]
    assert str(said[0]).startswith("GradientMismatch")


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_adjoint_pairs_pass_and_others_do_not(dtype: torch.dtype) -> None:
    def body(right: bool) -> object:
        rank = dist.get_rank()
        turn = torch.tensor(1 + 2j if dtype.is_complex else 2.0, dtype=dtype)
        x, y = draw(SIZES[rank], dtype=dtype), draw(sum(SIZES), dtype=dtype)

        def adjoint(y: Tensor) -> Tensor:
            total = AllSum.apply(y) if right or dtype.is_complex else y
            return total.split(SIZES)[rank] * (turn.conj() if right else turn)

        return outcome(adjoint_check, lambda x: turn * Gather.apply(x, SIZES, True), adjoint, x, y)

    assert run_ranks(body, 3, True) == [True] * 3
    said = run_ranks(body, 3, False)
    assert len(set(said)) == 1
    assert str(said[0]).startswith("NotAdjoint: adjoint_check: <A x, y> = ")
    assert "\n  rank 2: <A x, y> = " in str(said[0])


def test_adjoint_shapes_are_compared_on_every_rank() -> None:
    def body() -> object:
        y = draw(2 if dist.get_rank() == 1 else 3)
        return outcome(adjoint_check, torch.clone, lambda y: y.new_zeros(3), draw(3), y)

    said = run_ranks(body, 2)
    assert "\n  rank 1: other shapes" in str(said[0])
    assert "<- does not fit" in str(said[0])
    assert "rank 1: x (3,), A* y (3,), A x (3,), y (2,)" in str(said[1])


def test_inputs_may_come_in_one_tuple() -> None:
    x, y = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(torch.mul, (x, y))
    assert gradgradcheck(torch.mul, [x, y])
    with pytest.raises(TensorError, match="no tensor but int"):
        gradcheck(torch.mul, x, 3)


def check_on_rank_1(check: str, returned: object) -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def fn(x: Tensor) -> object:
        return returned if dist.get_rank() == 1 else x * 2

    calls: dict[str, Any] = {
        "gradcheck": lambda: gradcheck(fn, x),
        "gradgradcheck": lambda: gradgradcheck(fn, x),
        "adjoint_check": lambda: adjoint_check(fn, lambda y: y, x, x),
    }
    with pytest.raises(TensorError, match="must return a tensor") as caught:
        calls[check]()
    odd = type(returned).__name__ if dist.get_rank() == 1 else "other values"
    rows = ["tensors", f"{odd} <- not tensors", "tensors"]
    lines = [" ".join(line.split()) for line in str(caught.value).split("\n")]
    assert lines[1:4] == [f"rank {rank}: {row}" for rank, row in enumerate(rows)]


@pytest.mark.parametrize("check", ["gradcheck", "gradgradcheck", "adjoint_check"])
@pytest.mark.parametrize("returned", [None, 1.0])
def test_what_is_no_tensor_is_refused_on_every_rank(check: str, returned: object) -> None:
    run_ranks(check_on_rank_1, 3, check, returned, timeout=20)
