"""One table of reductions: the name, torch's name, and what each does to stacked pieces.

``sum`` and ``mean`` are linear: the backend adds, and their derivative is an adjoint. The others
are nonlinear: the pieces are gathered and torch itself reduces them, so that values (NaN included)
and derivatives (ties, zeros) are torch's own, to any order and in every mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from allgrad.errors import ReductionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["REDUCTIONS", "Reduction", "find"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """How pieces from all ranks become one.

    name: what callers say.        wire: what ``torch.distributed.ReduceOp`` calls it.
    stacked: reduces dimension ``dim`` of pieces stacked there.
    empty: the value over no pieces at all, for a dtype.
    """

    name: str
    wire: str | None
    stacked: Callable[[Tensor, int], Tensor]
    empty: Callable[[torch.dtype], float | bool] | None
    linear: bool = False

    def check(self, op: str, dtype: torch.dtype) -> None:
        """Raise where this reduction of this dtype has no exact meaning, or torch has none."""
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise ReductionError(
                f"{op}: torch does not compute with {_short(dtype)}, so there is no "
                f"{self.name!r} of it.\n"
                "Reduce x.bfloat16() or x.float(), and convert the result; pieces can be gathered as they are."
            )
        if dtype in _WIDER and (dtype.is_complex or self.name not in {"mean", "logsumexp"}):
            raise ReductionError(
                f"{op}: torch does not reduce {_short(dtype)}, so there is no {self.name!r} of it.\n"
                f"Reduce {_WIDER[dtype]}, and convert the result; pieces can be gathered as they are."
            )
        if self.name in {"min", "max"} and dtype.is_complex:
            raise ReductionError(
                f"{op}: complex numbers have no order, so {self.name!r} of {_short(dtype)} is "
                "undefined.\nReduce x.abs(), x.real or x.imag instead."
            )
        if self.name == "logsumexp" and dtype.is_complex:
            raise ReductionError(
                f"{op}: 'logsumexp' is taken of real numbers, not of {_short(dtype)}.\n"
                "Reduce the real and imaginary parts as your formula needs them."
            )
        if self.name in {"mean", "logsumexp"} and not (dtype.is_floating_point or dtype.is_complex):
            raise ReductionError(
                f"{op}: {self.name!r} of {_short(dtype)} is not a whole number.\n"
                "Call it on x.float() or x.double()."
            )
        if self.name in {"sum", "prod"} and dtype == torch.bool:
            raise ReductionError(
                f"{op}: {self.name!r} of bool does not fit in bool.\n"
                "Use op='max' for any, op='min' for all, or x.int() to count."
            )


_WIDER = {
    torch.uint16: "x.int()",
    torch.uint32: "x.long()",
    torch.uint64: "x.long()",
    torch.complex32: "x.to(torch.complex64)",
}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _highest(dtype: torch.dtype) -> float | bool:
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _lowest(dtype: torch.dtype) -> float | bool:
    if dtype == torch.bool:
        return False
    return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _prod(t: Tensor, dim: int) -> Tensor:
    if t.shape[dim] == 1:
        # The gradient of a product of one number, if it is zero or in a graph, is a constant for torch: the
        # next derivative would come to the call on other ranks only, which have more
        # (test_second_derivative_with_a_zero_on_the_first_rank).
        behind = t.dim() - 1 - dim % t.dim()
        t = pad(t, (0, 0) * behind + (0, 1), value=1)  # autocast refuses some dtypes in a cat
    return t.prod(dim, dtype=t.dtype)


REDUCTIONS: dict[str, Reduction] = {
    r.name: r
    for r in (
        Reduction("sum", "SUM", lambda t, d: t.sum(d, dtype=t.dtype), lambda _: 0, linear=True),
        Reduction("mean", "AVG", lambda t, d: t.mean(d), None, linear=True),
        Reduction("prod", "PRODUCT", _prod, lambda _: 1),
        Reduction("min", "MIN", lambda t, d: t.amin(d), _highest),
        Reduction("max", "MAX", lambda t, d: t.amax(d), _lowest),
        Reduction("logsumexp", None, lambda t, d: t.logsumexp(d), lambda _: -float("inf")),
    )
}

_BY_WIRE_NAME = {r.wire: r for r in REDUCTIONS.values() if r.wire is not None}


def find(op: str, reduction: object, dtype: torch.dtype) -> Reduction:
    """Look up a reduction given by name or as a ``torch.distributed.ReduceOp``."""
    found = REDUCTIONS.get(reduction) if isinstance(reduction, str) else None
    if found is None and not isinstance(reduction, str):
        kind = getattr(reduction, "op", reduction)  # ReduceOp wraps its kind in .op
        found = _BY_WIRE_NAME.get(getattr(kind, "name", ""))
    if found is None:
        known = ", ".join(repr(name) for name in REDUCTIONS)
        raise ReductionError(
            f"{op}: there is no exact reduction {reduction!r}.\n"
            f"Use one of {known}, or the ReduceOp of that meaning."
        )
    found.check(op, dtype)
    return found


def zeros_of_no_rows(reduction: Reduction, x: Tensor) -> Tensor:
    """Zeros in the shape of a row of ``x``, which has none; they stay in the graph, for backward
    needs every rank.

    They are reduced as the rows of other ranks are: the next derivative comes to the call again on all
    ranks or on none (test_second_derivative_of_a_linear_loss), and where others save a tensor for backward,
    which lets torch's checkpoint call a block again, so does this one (test_checkpoint_that_saves_on_one_rank).
    """
    if x.dtype == torch.bool:
        return x.any(0)
    zeros = x.sum(0, keepdim=True, dtype=x.dtype)
    return reduction.stacked(zeros + 1, 0) - 1
