"""Which collectives and arguments fit what the ranks hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SAME_SHAPE = ("all_reduce", "broadcast", "reduce", "scan", "share", "split", "reduce_scatter")
RAGGED = ("all_gather", "gather", "permute", "shift", "all_to_all", "scatter", "gather_sizes")
REDUCING = {"all_reduce", "reduce", "scan", "reduce_scatter"}
ALONG_DIM = {"split", "reduce_scatter", *RAGGED}
SAME_GRAD = {"all_reduce", "all_gather", "broadcast"}
LOW = ("torch.float32", "torch.bfloat16", "torch.float16")
LINEAR = {"sum", "mean"}
ALL = {"sum", "mean", "prod", "min", "max", "logsumexp"}


def ops(dtype: str) -> tuple[str, ...]:
    """The reductions of a dtype."""
    if "complex" in dtype:
        return ("sum", "mean", "prod")
    if "bool" in dtype:
        return ("min", "max")
    if dtype in LOW or "int" in dtype:
        return ("sum", "prod", "min", "max")
    return tuple(ALL)


def fits(held: dict[int, Tensor], what: str, dim: int | None, groups: list[list[int]]) -> bool:
    """Tell whether a variable's pieces go together in every group."""
    if what == "scatter" and any(held[r].dim() == 0 for group in groups for r in group):
        return False
    for group in groups:
        shapes = [list(held[r].shape) for r in group]
        if dim is not None and any(not inside(dim, max(len(shape), 1)) for shape in shapes):
            return False
        for shape in shapes if what in RAGGED else ():
            if shape:
                shape[dim] = 0
        if any(shape != shapes[0] for shape in shapes):
            return False
    return True


def inside(dim: int, dims: int) -> bool:
    return -dims <= dim < dims


def ways_to_tell_sizes(
    variables: Sequence[dict[int, Tensor]],
    what: str,
    dim: int | None,
    groups: list[list[int]],
) -> list[str]:
    """ "found", "given" and "equal", as far as the pieces allow."""
    if what not in ALONG_DIM or what == "gather_sizes":
        return ["found"]
    lengths = [
        [tuple(held[r].shape[dim] if held[r].dim() else 1 for r in group) for group in groups]
        for held in variables
    ]
    ways = ["found"]
    if all(found == lengths[0] for found in lengths):
        ways.append("given")
    if all(len(set(group)) == 1 for found in lengths for group in found):
        pieces = what in {"all_gather", "gather", "permute", "shift"}
        if pieces or all(g[0] % len(g) == 0 for found in lengths for g in found):
            ways.append("equal")
    return ways
