"""The wire inside a graph: functional ops, which compilers see and schedule.

``torch.compile`` traces through the collectives down to here. The ops also know the shapes of
their results without moving anything, so that fake tensors take this way too. Nothing is moved as
bytes and no way is picked by size: both would hide from the compiler what it could schedule.

Each op is a name of our own for torch's ``_c10d_functional`` op and its wait, into which it
dissolves when a graph is lowered. The name carries a batching rule: torch's own ops have none, and
what their fallback gives under ``vmap`` is silently wrong (test_jacrev_under_compile).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "in_graph",
    "reduce",
    "reduce_scatter",
]

_LIBRARY = torch.library.Library("allgrad", "DEF")
_C10D = torch.ops._c10d_functional  # noqa: SLF001
_OPS = torch.ops.allgrad


def in_graph(x: Tensor) -> bool:
    """Tell whether the call is being traced, or made with a tensor that only has a shape."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def all_reduce(x: Tensor, name: str) -> Tensor:
    """Sum over ranks, on every rank."""
    return _as_real(x, lambda t, _: _OPS.all_reduce(t, name))


def broadcast(x: Tensor, src: int, name: str) -> Tensor:
    """What ``src`` holds, on every rank."""
    return _as_real(x, lambda t, _: _OPS.broadcast(t, src, name))


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], name: str) -> Tensor:
    """Block ``r`` of ``x`` to rank ``r``; the blocks received, in rank order."""
    return _as_real(
        x,
        lambda t, width: _OPS.all_to_all(
            t, [n * width for n in receive], [n * width for n in send], name
        ),
    )


def all_gather(x: Tensor, counts: Sequence[int], name: str) -> Tensor:
    """Every rank's block, in rank order, on every rank."""
    world = len(counts)
    if all(count == counts[0] for count in counts):
        return _as_real(x, lambda t, _: _OPS.all_gather(t, world, name))
    return all_to_all(x.repeat(world), [x.shape[0]] * world, counts, name)


def reduce_scatter(x: Tensor, counts: Sequence[int], rank: int, name: str) -> Tensor:
    """Block ``r`` of ``x``, summed over ranks, on rank ``r``."""
    world = len(counts)
    if all(count == counts[0] for count in counts):
        return _as_real(x, lambda t, _: _OPS.reduce_scatter(t, world, name))
    rows = all_to_all(x, counts, [counts[rank]] * world, name)
    return rows.view(world, counts[rank]).sum(0, dtype=x.dtype)


def reduce(x: Tensor, dst: int, rank: int, world: int, name: str) -> Tensor:
    """Sum over ranks on ``dst``; zeros on the others."""
    n = x.shape[0]
    send = [n if r == dst else 0 for r in range(world)]
    rows = all_to_all(x, send, [n if rank == dst else 0] * world, name)
    return rows.view(world, n).sum(0, dtype=x.dtype) if rank == dst else torch.zeros_like(x)


def _as_real(x: Tensor, call: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Backends carry no complex numbers: two real ones each travel instead."""
    if not x.is_complex():
        return call(x, 1)
    return torch.view_as_complex(call(torch.view_as_real(x).view(-1), 2).view(-1, 2))


def _op(schema: str) -> Callable[[Callable[..., Tensor]], None]:
    """Give a functional op and its wait a name of our own, with a batching rule.

    Whatever is flat along its first dimension may be wider than one element: the batch goes last,
    and counts in elements become counts in rows.
    """
    name = schema.partition("(")[0]

    def register(lower: Callable[..., Tensor]) -> None:
        def composite(x: Tensor, *rest: Any) -> Tensor:
            done: Tensor = _C10D.wait_tensor(lower(x, *rest))
            return done

        def batched(
            info: Any, in_dims: tuple[int | None, ...], x: Tensor, *rest: Any
        ) -> tuple[Tensor, int]:
            assert in_dims[0] is not None
            rows = x.movedim(in_dims[0], -1).contiguous()
            wide = [[n * info.batch_size for n in r] if isinstance(r, list) else r for r in rest]
            flat = getattr(_OPS, name)(rows.view(-1), *wide)
            return flat.view(-1, info.batch_size), 1

        _LIBRARY.define(schema)
        _LIBRARY.impl(name, composite, "CompositeImplicitAutograd")
        torch.library.register_vmap(f"allgrad::{name}", batched, lib=_LIBRARY)

    return register


@_op("all_reduce(Tensor x, str group) -> Tensor")
def _(x: Tensor, group: str) -> Any:
    return _C10D.all_reduce(x, "sum", group)


@_op("broadcast(Tensor x, int src, str group) -> Tensor")
def _(x: Tensor, src: int, group: str) -> Any:
    return _C10D.broadcast(x, src, group)


@_op("all_to_all(Tensor x, SymInt[] receive, SymInt[] send, str group) -> Tensor")
def _(x: Tensor, receive: list[int], send: list[int], group: str) -> Any:
    return _C10D.all_to_all_single(x, receive, send, group)


@_op("all_gather(Tensor x, int world, str group) -> Tensor")
def _(x: Tensor, world: int, group: str) -> Any:
    return _C10D.all_gather_into_tensor(x, world, group)


@_op("reduce_scatter(Tensor x, int world, str group) -> Tensor")
def _(x: Tensor, world: int, group: str) -> Any:
    return _C10D.reduce_scatter_tensor(x, "sum", world, group)
