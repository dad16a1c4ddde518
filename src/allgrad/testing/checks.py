"""Checks that all ranks call together: gradients against differences, pairs by <A x, y> = <x, A* y>.

The objective is the sum over ranks of ``<w, fn(inputs)>``, with fixed random weights ``w`` that
differ by rank. A check raises on every rank or on none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from allgrad._wire.world import rank_of, size_of, sum_over_ranks
from allgrad.errors import AllgradError, TensorError, rank_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from allgrad._wire.world import ProcessGroup

    Function: TypeAlias = Callable[..., Tensor | tuple[Tensor, ...]]

__all__ = ["GradientMismatch", "NotAdjoint", "adjoint_check", "gradcheck", "gradgradcheck"]


class GradientMismatch(AllgradError):
    """A gradient differs from the derivative of the sum over ranks."""


class NotAdjoint(AllgradError):
    """``<A x, y>`` and ``<x, A* y>``, summed over ranks, are not equal."""


def gradcheck(
    fn: Function,
    *inputs: Tensor | Sequence[Tensor],
    group: ProcessGroup | None = None,
    eps: float = 1e-6,
    atol: float = 1e-7,
    rtol: float = 1e-5,
) -> bool:
    """Compare each rank's gradients with central differences of the objective.

    Each rank passes its own inputs: shapes may differ, and on some ranks no input may require
    grad. One element on one rank is changed at a time, and every rank evaluates ``fn``.

        rank 0   fn(x + eps)          <w, .>
        rank 1   fn(y)                <w, .>     --->    the sum changes by  dL/dx * eps
        rank 2   fn(z)                <w, .>

    The analytic gradient is one ``backward()`` on each rank whose outputs require grad, so that
    nodes of the graph that no local input needs take part too.

    Cost: two evaluations for each real number that requires grad, counted over all ranks.
    Inputs may also come as one tuple, as for torch's ``gradcheck``.
    """
    xs = _one_by_one(inputs)
    _require_exact("gradcheck", xs, group)
    analytic = _backward(fn, xs, group)
    numeric = _differences(fn, xs, group, eps)
    worst = _Worst.of(xs, analytic, numeric, atol, rtol)
    rows = _gather_rows(torch.tensor(astuple(worst), dtype=torch.float64, device="cpu"), group)
    found = [_Worst(*row) for row in rows.tolist()]
    wrong = {rank: "wrong" for rank, one in enumerate(found) if one.excess > 1}
    if wrong:
        raise GradientMismatch(
            rank_table(
                "gradcheck: a gradient differs from the derivative of the sum over ranks.",
                [str(one) for one in found],
                wrong,
                "The worst element of each rank is shown. A rank's gradient includes what its "
                "input does to every other rank's output.",
            )
        )
    return True


def _one_by_one(inputs: tuple[Tensor | Sequence[Tensor], ...]) -> tuple[Tensor, ...]:
    if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
        inputs = tuple(inputs[0])
    for x in inputs:
        if not isinstance(x, Tensor):
            raise TensorError(
                f"gradcheck: an input is no tensor but {type(x).__name__}.\n"
                "Pass tensors one by one, or in one tuple; bind other arguments with a lambda."
            )
    return inputs  # type: ignore[return-value]


def gradgradcheck(
    fn: Function,
    *inputs: Tensor | Sequence[Tensor],
    group: ProcessGroup | None = None,
    eps: float = 1e-6,
    atol: float = 1e-7,
    rtol: float = 1e-5,
) -> bool:
    """Check second derivatives, by ``gradcheck`` of the backward pass of ``fn``.

    The backward pass maps the inputs and the gradients of the outputs to the gradients of the
    inputs. Every floating-point input is taken to require grad, so that all ranks take part in
    both backward passes.
    """
    given = _one_by_one(inputs)
    _require_exact("gradgradcheck", given, group)
    given = tuple(x.detach().requires_grad_(_floating(x)) for x in given)
    outputs = _tensors("gradgradcheck", fn(*given), group)
    upstream = [w.requires_grad_() for w in _weights(_differentiable(outputs), rank_of(group))]

    def gradients(*both: Tensor) -> tuple[Tensor, ...]:
        xs = both[: len(given)]
        outputs = _differentiable(_listed(fn(*xs)))
        return torch.autograd.grad(
            outputs,
            [x for x in xs if _floating(x)],
            both[len(given) :],
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )

    return gradcheck(gradients, *given, *upstream, group=group, eps=eps, atol=atol, rtol=rtol)


def adjoint_check(
    forward: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    *,
    group: ProcessGroup | None = None,
    rtol: float = 1e-12,
) -> bool:
    """Check ``<A x, y> = <x, A* y>``, real parts, summed over ranks.

    Each rank passes its piece ``x`` of the input and its piece ``y`` of the output; either may be
    empty. ``rtol`` is relative to the norms of the vectors, since terms of the product may cancel.
    """
    there, back = _tensors("adjoint_check", (forward(x), adjoint(y)), group)
    there, back = there.detach(), back.detach()
    _require_fit(there, back, x, y, group)
    left, right = _inner(there, y), _inner(x, back)
    bounds = [_norm(there) * _norm(y), _norm(x) * _norm(back)]
    rows = _gather_rows(torch.stack([left, right, *bounds]).cpu(), group)
    total, scale = rows[:, :2].sum(0), rows[:, 2:].sum(0).max()
    if not abs(total[0] - total[1]) <= rtol * scale:
        raise NotAdjoint(
            rank_table(
                f"adjoint_check: <A x, y> = {total[0]:.15g}, but <x, A* y> = {total[1]:.15g}.",
                [f"<A x, y> = {row[0]:.15g}, <x, A* y> = {row[1]:.15g}" for row in rows],
                {},
                "The sums over ranks must agree; the contributions of one rank need not.",
            )
        )
    return True


@dataclass(frozen=True, slots=True)
class _Worst:
    """The element of one rank with the largest error, as numbers that can be sent."""

    excess: float = -1.0  # the error over its tolerance
    position: float = 0.0
    is_complex: float = 0.0
    at: float = 0.0  # among the real numbers of the input
    analytic: float = 0.0
    numeric: float = 0.0

    @classmethod
    def of(
        cls,
        inputs: Sequence[Tensor],
        analytic: dict[int, Tensor],
        numeric: dict[int, Tensor],
        atol: float,
        rtol: float,
    ) -> _Worst:
        worst = cls()
        for position, exact in analytic.items():
            near = numeric[position]
            excess = (exact - near).abs() / (atol + rtol * near.abs())
            excess = torch.where(excess.isnan(), torch.inf, excess)
            if excess.numel() and float(excess.max()) > worst.excess:
                at = int(excess.argmax())
                numbers = float(excess[at]), float(exact[at]), float(near[at])
                worst = cls(numbers[0], position, inputs[position].is_complex(), at, *numbers[1:])
        return worst

    def __str__(self) -> str:
        if self.excess < 0:
            return "nothing requires grad"
        element, part = divmod(int(self.at), 2 if self.is_complex else 1)
        named = (("re", "im")[part] + " ") if self.is_complex else ""
        return (
            f"input {self.position:.0f}, element {element}: "
            f"{named}analytic {self.analytic:.9g}, {named}numeric {self.numeric:.9g}"
        )


def _backward(
    fn: Function, inputs: Sequence[Tensor], group: ProcessGroup | None
) -> dict[int, Tensor]:
    """The gradients of the objective on this rank, by position of the input."""
    leaves = [_leaf(x) for x in inputs]
    objective = _objective(_tensors("gradcheck", fn(*leaves), group), rank_of(group))
    if objective.requires_grad:
        objective.backward()
    return {
        position: _reals(torch.zeros_like(x) if x.grad is None else x.grad)
        for position, x in enumerate(leaves)
        if x.requires_grad
    }


def _differences(
    fn: Function, inputs: Sequence[Tensor], group: ProcessGroup | None, eps: float
) -> dict[int, Tensor]:
    """The derivatives of the objective on this rank, by one central difference for each number."""
    rank = rank_of(group)
    moves = [
        (position, at)
        for position, x in enumerate(inputs)
        if x.requires_grad
        for at in range(_reals(x).numel())
    ]
    own = torch.tensor([len(moves)], dtype=torch.float64, device="cpu")
    counts = [int(row[0]) for row in _gather_rows(own, group).tolist()]
    changes = torch.zeros(sum(counts), dtype=torch.float64, device="cpu")
    step = 0
    for owner, count in enumerate(counts):
        for nth in range(count):
            move = moves[nth] if owner == rank else None
            ahead = _objective(_listed(fn(*_moved(inputs, move, eps))), rank)
            behind = _objective(_listed(fn(*_moved(inputs, move, -eps))), rank)
            changes[step] = (ahead - behind).detach()
            step += 1
    derivatives = sum_over_ranks(changes, group).split(counts)[rank] / (2 * eps)
    return {
        position: derivatives[[nth for nth, move in enumerate(moves) if move[0] == position]]
        for position, x in enumerate(inputs)
        if x.requires_grad
    }


def _moved(inputs: Sequence[Tensor], move: tuple[int, int] | None, by: float) -> list[Tensor]:
    """Copies of the inputs, with one real number of one of them changed."""
    copies = [x.detach().clone() for x in inputs]
    if move is not None:
        position, at = move
        x = copies[position]
        element, part = divmod(at, 2 if x.is_complex() else 1)
        x[torch.unravel_index(torch.tensor(element, device="cpu"), x.shape)] += (
            complex(0, by) if part else by
        )
    return [c.requires_grad_(x.requires_grad) for c, x in zip(copies, inputs, strict=True)]


def _objective(results: Sequence[Tensor], rank: int) -> Tensor:
    """``<w, fn(inputs)>`` on this rank."""
    outputs = _differentiable(results)
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for output, weight in zip(outputs, _weights(outputs, rank), strict=True):
        total = total + _inner(output, weight).cpu()
    return total


def _tensors(check: str, result: object, group: ProcessGroup | None) -> list[Tensor]:
    """The tensors that a function returned; raises on every rank if it returned others on some."""
    found = _listed(result)
    _refuse_everywhere(
        [type(x).__name__ for x in found if not isinstance(x, Tensor)],
        f"{check}: a function must return a tensor, or a tuple of tensors.",
        ("not tensors", "other values", "tensors"),
        "Return what is to be differentiated.",
        group,
    )
    return found


def _listed(result: Any) -> list[Any]:
    return (
        list(result)
        if isinstance(result, Iterable) and not isinstance(result, Tensor)
        else [result]
    )


def _differentiable(results: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in results if _floating(x)]


def _weights(outputs: Sequence[Tensor], rank: int) -> list[Tensor]:
    """The same numbers at every evaluation, different ones on every rank."""
    generator = torch.Generator().manual_seed(7919 + rank)
    return [
        torch.randn(out.shape, dtype=out.dtype, generator=generator, device="cpu").to(out.device)
        for out in outputs
    ]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _floating(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _reals(x: Tensor) -> Tensor:
    """The real numbers of ``x`` in order; a complex number is its real and its imaginary part."""
    x = x.detach().resolve_conj()
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(-1).cpu()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return torch.sum(a * b.conj()).real.double()


def _norm(x: Tensor) -> Tensor:
    return x.detach().abs().double().square().sum().sqrt()


def _gather_rows(row: Tensor, group: ProcessGroup | None) -> Tensor:
    """The rows of all ranks, on every rank; all rows have the same length."""
    rows = torch.zeros(size_of(group), len(row), dtype=torch.float64, device="cpu")
    rows[rank_of(group)] = row
    return sum_over_ranks(rows, group)


def _require_exact(check: str, inputs: Sequence[Tensor], group: ProcessGroup | None) -> None:
    _refuse_everywhere(
        [f"{x.dtype}".removeprefix("torch.") for x in inputs if _coarse(x)],
        f"{check}: inputs that require grad must be float64 or complex128.",
        ("too coarse", "coarser inputs", "exact"),
        "Differences in a coarser dtype are too inexact; pass x.double().",
        group,
    )


def _refuse_everywhere(
    own: Sequence[str],
    rule: str,
    words: tuple[str, str, str],
    advice: str,
    group: ProcessGroup | None,
) -> None:
    """Raise on every rank if one has something odd: a mark for it, what others show of it, and of none."""
    mark, odd, none = words
    rows = _gather_rows(torch.tensor([len(own)], dtype=torch.float64, device="cpu"), group)
    bad = {rank: mark for rank, count in enumerate(rows[:, 0].tolist()) if count}
    if bad:
        shown = [odd if rank in bad else none for rank in range(len(rows))]
        shown[rank_of(group)] = ", ".join(own) or none
        raise TensorError(rank_table(rule, shown, bad, advice))


def _coarse(x: Tensor) -> bool:
    return x.requires_grad and x.dtype not in (torch.float64, torch.complex128)


def _require_fit(
    there: Tensor, back: Tensor, x: Tensor, y: Tensor, group: ProcessGroup | None
) -> None:
    own = float(there.shape != y.shape or back.shape != x.shape)
    rows = _gather_rows(torch.tensor([own], dtype=torch.float64, device="cpu"), group)
    bad = {rank: "does not fit" for rank, flag in enumerate(rows[:, 0].tolist()) if flag}
    if bad:
        found = ["other shapes" if rank in bad else "fits" for rank in range(len(rows))]
        found[rank_of(group)] = (
            f"x {tuple(x.shape)}, A* y {tuple(back.shape)}, "
            f"A x {tuple(there.shape)}, y {tuple(y.shape)}"
        )
        raise NotAdjoint(
            rank_table(
                "adjoint_check: A x must have the shape of y, and A* y the shape of x.",
                found,
                bad,
                "Pass a y with the shape of A x on this rank.",
            )
        )
