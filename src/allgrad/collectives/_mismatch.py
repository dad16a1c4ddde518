"""The error for pieces that do not fit together: which rank differs, in what."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from allgrad._wire.codec import dtype_name
from allgrad.errors import AllgradError, InputError, PieceMismatch, rank_table

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from allgrad._wire.calls import Call
    from allgrad._wire.handshake import RankArgs, TensorSpec
    from allgrad.collectives._inputs import Leaves

__all__ = ["pieces_differ"]


def pieces_differ(
    call: Call, leaves: Leaves, ranks: Sequence[RankArgs], *, free: bool
) -> AllgradError:
    """The error of ranks whose arguments differ in more than their length in dim, if that is free."""
    name = call.name
    return (
        _unless_alike(
            [args.operation for args in ranks],
            [str(args) for args in ranks],
            f"{name}: the ranks called different collectives.",
            lambda odd, _: f"called {ranks[odd].operation}",
            "Call the same collectives in the same order on every rank.",
        )
        or _unless_alike(
            [(len(args.tensors), args.names) for args in ranks],
            [f"{len(args.tensors)} tensors" for args in ranks],
            f"{name}: the ranks' nests have one structure.",
            lambda _, __: "another structure",
            "Give every rank the same containers, keys and lengths, with tensors in the same places.",
        )
        or _roots_differ(call, ranks)
        or next(
            (
                error
                for i, leaf in enumerate(leaves.names())
                if (error := _leaf_differs(call, leaf, [args.tensors[i] for args in ranks], free))
            ),
            None,
        )
        or AllgradError(f"{name}: the ranks' messages differ in a way that cannot be told.")
    )


def _roots_differ(call: Call, ranks: Sequence[RankArgs]) -> InputError | None:
    roots = [args.root for args in ranks]
    if ranks[0].operation != "permute":
        return _unless_alike(
            roots,
            [f"root {root}" for root in roots],
            f"{call.name}: the ranks name one src or dst.",
            lambda odd, usual: f"{roots[odd]}, not {roots[usual]}",
            "Give every rank the same src or dst.",
        )
    what = "pairs" if call.name == "permute" else "offset and wrap"
    return _unless_alike(
        roots,
        [str(args) for args in ranks],
        f"{call.name}: the ranks send pieces to the same places.",
        lambda _, __: f"other {what}",
        f"Give every rank the same {what}.",
    )


def _leaf_differs(call: Call, leaf: str, specs: list[TensorSpec], free: bool) -> InputError | None:
    name = f"{call.name}: {leaf}: " if leaf else f"{call.name}: "
    rows = [str(spec) for spec in specs]
    found = (
        _unless_alike(
            [spec.dtype for spec in specs],
            rows,
            f"{name}pieces have one dtype.",
            lambda _, usual: f"not {dtype_name(specs[usual].dtype)}",
            "Cast the pieces to one dtype before the call.",
        )
        or _unless_alike(
            [len(spec.shape) for spec in specs],
            rows,
            f"{name}pieces have one number of dimensions.",
            lambda odd, usual: f"{len(specs[odd].shape)} dimensions, not {len(specs[usual].shape)}",
            "Reshape the pieces before the call.",
        )
        or _unless_alike(
            [spec.dim for spec in specs],
            [f"{spec}, dim {spec.dim}" for spec in specs],
            f"{name}the ranks name one dim.",
            lambda odd, usual: f"dim {specs[odd].dim}, not {specs[usual].dim}",
            "Give every rank the same dim.",
        )
    )
    if found:
        return found
    free_dim = specs[0].dim if free else -1
    rule = f"pieces may differ along dim {free_dim} only" if free else "all ranks have one shape"
    for dim in range(len(specs[0].shape)):
        if dim != free_dim:
            found = _unless_alike(
                [spec.shape[dim] for spec in specs],
                rows,
                f"{name}{rule}.",
                lambda _, __, d=dim: f"differs in dim {d}",  # type: ignore[misc]
                f"Give every rank the same length in dim {dim} before the call.",
            )
            if found:
                return found
    return None


def _unless_alike(
    values: Sequence[Hashable],
    rows: Sequence[str],
    rule: str,
    mark: Callable[[int, int], str],
    advice: str,
) -> InputError | None:
    """The error of ranks that differ from most; ``mark(odd, usual)`` says how, by their ranks."""
    ((usual, count),) = Counter(values).most_common(1)
    if count == len(values):
        return None
    model = values.index(usual)
    marks = {rank: mark(rank, model) for rank, value in enumerate(values) if value != usual}
    return PieceMismatch(rank_table(rule, rows, marks, advice))
