"""Collectives in compiled graphs: ops that run the eager call itself.

A graph holds two kinds of node of ours. ``run`` runs one map of an adjoint pair; ``exchange`` is the
size exchange before a call whose sizes are found out. When the graph runs, the op makes the pair
again from what the node keeps (who makes it, the sizes, the group's name) and calls the same map on
the same tensors as eager code. So a rank puts the same messages on the wire whether it compiled the
call, compiles it again, or fell back to eager, and algorithms, ``checked``, ``deadline`` and errors
are the same in both. While a graph is traced, an op only tells shapes. Sizes are ``SymInt``: one
graph serves all of them. Found sizes come out of ``exchange`` as the lengths of empty tensors, which
makes them unbacked ``SymInt`` without a setting of TorchDynamo's.

Compilers must not move, merge, drop or repeat what sends. Both ops are therefore registered as
effects in order, with a lowering of their own for Inductor (``keep_order_in_inductor``), and tagged as
not deterministic, which also keeps fake tensors from computing with constants. ``apply`` is a name
for ``run`` that carries what a derivative needs: a backward of any order, a tangent and a batch
(torch.library's own rules give a silent zero under torch.func.jvp). It dissolves into ``run`` when a
graph is lowered.
"""

from __future__ import annotations

import weakref
from ast import literal_eval
from functools import lru_cache, partial
from operator import index  # of an int that varies TorchDynamo makes a constant of the graph
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from allgrad._autograd import started_calls
from allgrad._autograd.adjoint_pair import HANDSHAKE, MAKERS
from allgrad._autograd.transforms import ANCHOR, apply
from allgrad._core.call_queue import in_backward
from allgrad._core.graph_internals import forget_own_guards, graph_internals
from allgrad._core.partition import Partition, dense
from allgrad._core.torch_internals import (
    constant_in_graphs,
    functorch_active,
    never_traced,
    process_group_named,
)
from allgrad._wire import calls
from allgrad._wire.groups import find_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import AdjointPair, Map
    from allgrad._wire.calls import Call

__all__ = ["RULES_VERSION", "exchange", "run", "run_in_lockstep", "run_plain"]

# torch keeps compiled graphs on disk and finds them by the names of their ops. Raise this number
# when a schema, a derivative, a batching rule or a lowering changes.
RULES_VERSION = 3
_NAMESPACE = f"allgrad_{RULES_VERSION}"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_OPS = getattr(torch.ops, _NAMESPACE)
_TORCH = graph_internals()

# Handing an argument to an op takes up to a microsecond each time: all that is constant is one string,
# a _Node. ``sizes``: those of the pair's partitions, then the length of each result along its dim.
_PAIR = "str node, SymInt[] sizes"
_CALL = "str group, str call, str nest, str details, str site, bool first"
_EXCHANGE = (
    f"str operation, int outputs, int[] dims, SymInt[] amounts, str names, int root, {_CALL}"
)
_SENDS = (torch.Tag.nondeterministic_seeded,)
_LIBRARY.define(f"run(Tensor[] xs, {_PAIR}) -> Tensor[]", tags=_SENDS)
_LIBRARY.define(f"exchange(Tensor[] xs, Tensor anchor, {_EXCHANGE}) -> Tensor[]", tags=_SENDS)
_LIBRARY.define(f"apply(Tensor[] xs, Tensor? anchor, {_PAIR}) -> Tensor[]", tags=_SENDS)


class _Node(NamedTuple):
    """What a node keeps of a pair and of its call."""

    maker: str
    flipped: bool
    numbers: Sequence[int]
    dims: Sequence[int]
    group: str
    name: str
    nest: str
    details: str
    site: str
    first: bool  # of its call


@constant_in_graphs
def _encoded(*fields: Any) -> str:
    return repr(fields)


@lru_cache(maxsize=4096)
def _decoded(node: str) -> _Node:
    return _Node(*literal_eval(node))


@lru_cache(maxsize=4096)
def _later(node: str, flip: bool) -> str:
    """The node of a derivative."""
    kept = _decoded(node)
    return _encoded(*kept._replace(flipped=kept.flipped != flip, first=False))


def run(pair: AdjointPair, xs: Sequence[Tensor]) -> list[Tensor]:
    """The pair's map in a graph, with every derivative."""
    # An input more of a compiled function, which most have no need of.
    needless = not torch.is_grad_enabled() or any(x.requires_grad for x in xs)
    anchor = None if needless and not functorch_active() else ANCHOR
    ys: list[Tensor] = _OPS.apply(list(xs), anchor, *_described(pair))
    forget_own_guards()
    return ys


@partial(torch.compiler.disable, reason="allgrad.lockstep orders collectives in eager code")
def run_in_lockstep(pair: AdjointPair, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The pair in eager code, between two graphs; its group is looked up again, as eager code holds it."""
    node, sizes = _described(pair)
    kept = _decoded(node)
    eager = _make(kept, xs, sizes)[1]
    return apply(eager.adjoint if kept.flipped else eager, xs)


def run_plain(pair: AdjointPair, xs: Sequence[Tensor]) -> list[Tensor]:
    """The pair's map on tensors that only have a shape, below autograd."""
    ys: list[Tensor] = _OPS.run(list(xs), *_described(pair))
    return ys


def exchange(
    call: Call,
    xs: Sequence[Tensor],
    operation: str,
    *,
    outputs: int,
    dims: Sequence[int],
    amounts: Sequence[int],
    names: str,
    root: int,
) -> list[int]:
    """The size exchange of a call, in a graph; the lengths it finds, so many."""
    about = operation, outputs, list(dims), list(amounts), names, root, *_described_call(call)
    found = _OPS.exchange(list(xs), ANCHOR, *about)
    return [t.shape[0] for t in found[:outputs]]


def _described(pair: AdjointPair) -> tuple[str, list[int]]:
    """What a node keeps of a pair, as the op's arguments."""
    made = pair.made
    assert made is not None
    partitions = [arg for arg in made.args if isinstance(arg, Partition)]
    numbers = [index(int(arg)) for arg in made.args if not isinstance(arg, Partition)]
    dims: list[int] = []
    sizes = [n for part in partitions for by_rank in part.sizes for n in by_rank]
    ends = MAKERS[made.maker].ends
    if ends is not None:
        before, after = ends(made.call, *made.args)
        dims = [index(dim) for dim in partitions[0].dims]
        sizes += before if made.flipped else after
    about = made.maker, made.flipped, numbers, dims
    return _encoded(*about, *_described_call(made.call)), sizes


def _described_call(call: Call) -> tuple[str, str, str, str, str, bool]:
    """What a node keeps of a call, and whether it is the first node of it."""
    name = call.group.name
    first = call.traced == []
    if first:
        call.traced.append(name)
    return name, call.name, call.nest, call.details, call.site, first


@never_traced
def _run(xs: list[Tensor], node: str, sizes: list[int]) -> list[Tensor]:
    if started_calls.STATE.count and not in_backward():
        _finish_started(*_decoded(node)[4:6])
    key: tuple[Any, ...] = node, *sizes
    known = _MAPS.get(key)
    if known is None or known[0]() is not process_group_named(known[1]) or calls.are_described():
        run = _new_map(key, xs, node, sizes)
    else:
        run = known[2]
    if torch.is_grad_enabled():
        with torch.no_grad():
            return [_own(y, xs) for y in run(xs)]
    return [_own(y, xs) for y in run(xs)]


def _finish_started(group: str, name: str) -> None:
    """Finish the calls that were started before this one, whose node is there already."""
    found = find_group(name, process_group_named(group) if group else None)
    started_calls.finish(found, in_place=True)


# The maps of nodes that ran before, with the process group that each is for and its name: another one
# may have got the same name since (test_graph_runs_on_a_new_world).
_MAPS: dict[tuple[Any, ...], tuple[weakref.ref[Any], str, Map]] = {}
_MOST = 4096


def _new_map(key: tuple[Any, ...], xs: list[Tensor], node: str, sizes: list[int]) -> Map:
    kept = _decoded(node)
    call, pair = _make(kept, xs, sizes)
    run = pair.backward if kept.flipped else pair.forward
    if kept.group and not calls.are_described():
        if len(_MAPS) >= _MOST:
            _MAPS.clear()
        _MAPS[key] = weakref.ref(call.group.process_group), kept.group, run
    return run


def _make(kept: _Node, xs: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Call, AdjointPair]:
    call = calls.of_graph(xs, *kept[4:])
    of_ranks = sizes[: len(sizes) - len(kept.dims)]
    partitions = _partitions(kept.dims, of_ranks, call.size)
    return call, MAKERS[kept.maker].make(call, *partitions, *kept.numbers)


def _partitions(dims: Sequence[int], sizes: Sequence[int], world: int) -> list[Partition]:
    """The partitions of a pair, all along the same dims; none for a map that keeps shapes."""
    each = len(dims)
    by_rank = [tuple(sizes[i : i + world]) for i in range(0, len(sizes), world)]
    starts = range(0, len(by_rank), each) if dims else ()
    return [Partition(tuple(dims), tuple(by_rank[i : i + each])) for i in starts]


def _own(y: Tensor, xs: Sequence[Tensor]) -> Tensor:
    """Memory of its own, as compilers expect of an op's results."""
    if y.is_contiguous() and y.untyped_storage().nbytes() == y.nbytes:
        for x in xs:
            if y is x:
                break
        else:
            return y
    return y.clone(memory_format=torch.contiguous_format)


def _run_fake(xs: list[Tensor], node: str, sizes: list[int]) -> list[Tensor]:
    _TORCH.keep_order_in_inductor()
    dims = _decoded(node).dims
    if not dims:
        return [x.new_empty(x.shape) for x in xs]
    lengths = sizes[-len(dims) :]
    return [
        x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :]))
        for x, dim, length in zip(xs, dims, lengths, strict=True)
    ]


@never_traced
def _exchange(  # noqa: PLR0917
    xs: list[Tensor],
    anchor: Tensor,  # noqa: ARG001
    operation: str,
    outputs: int,
    dims: list[int],
    amounts: list[int],
    names: str,
    root: int,
    *call: Any,
) -> list[Tensor]:
    real = calls.of_graph(xs, *call)
    with torch.no_grad():
        found = HANDSHAKE[0](real, xs, operation, dims, amounts, names, root)[:outputs]
    assert len(found) == outputs
    return [torch.empty(n, 0, device="cpu") for n in found] or [torch.empty(0, device="cpu")]


def _exchange_fake(
    xs: list[Tensor],  # noqa: ARG001
    anchor: Tensor,  # noqa: ARG001
    operation: str,  # noqa: ARG001
    outputs: int,
    *_: Any,
) -> list[Tensor]:
    _TORCH.keep_order_in_inductor()
    lengths = [_TORCH.unbacked_size() for _ in range(outputs)]
    return [torch.empty(n, 0, device="cpu") for n in lengths] or [torch.empty(0, device="cpu")]


class _AtOneLevel(_TORCH.SingleLevelFunction):  # type: ignore[misc, name-defined]
    """The derivative at one level of torch.func, or at the only one there is."""

    @staticmethod
    def forward(
        anchor: Tensor | None, node: str, sizes: Sequence[int], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        if any(_TORCH.is_wrapped(x) for x in xs):
            with torch.enable_grad(), _TORCH.set_fwd_grad_enabled(True), _TORCH.below_autograd():
                return tuple(_OPS.apply(xs, anchor, node, sizes))  # at the level below
        return tuple(_OPS.run(xs, node, sizes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        ctx.anchor, ctx.node, ctx.sizes, *xs = inputs
        dims = _decoded(ctx.node).dims
        of_ranks = ctx.sizes[: len(ctx.sizes) - len(dims)]
        lengths = [x.shape[dim] for x, dim in zip(xs, dims, strict=bool(dims))]
        ctx.sizes_back = [*of_ranks, *lengths]

    @staticmethod
    def backward(ctx: Any, *ys: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph=True every rank takes part in the next derivative too.
        anchor = ANCHOR if ctx.anchor is None and torch.is_grad_enabled() else ctx.anchor
        back = _later(ctx.node, flip=True)
        return None, None, None, *_OPS.apply(dense(ys), anchor, back, ctx.sizes_back)

    @staticmethod
    def jvp(
        ctx: Any, _anchor: None, _node: None, _sizes: None, *tangents: Tensor
    ) -> tuple[Tensor, ...]:
        again = _later(ctx.node, flip=False)
        return tuple(_OPS.apply(tangents, ctx.anchor, again, ctx.sizes))


def _apply(xs: list[Tensor], anchor: Tensor | None, node: str, sizes: list[int]) -> list[Tensor]:
    with _TORCH.enable_single_level():
        return list(_AtOneLevel.apply(anchor, node, sizes, *xs))


def _batched(
    info: Any, in_dims: tuple[Any, ...], xs: list[Tensor], anchor: Tensor | None, *made: Any
) -> tuple[list[Tensor], list[int]]:
    """The batch goes last: pairs name dimensions from the front, so it travels along unseen.

    Results have it first again, each entry contiguous as without a batch: of other strides torch
    cannot take views or tangents while a length is known only when the graph runs.
    """
    rows = [
        x.unsqueeze(-1).expand(*x.shape, info.batch_size) if dim is None else x.movedim(dim, -1)
        for x, dim in zip(xs, in_dims[0], strict=True)
    ]
    layout = torch.contiguous_format
    ys = [y.movedim(-1, 0).clone(memory_format=layout) for y in _OPS.apply(rows, anchor, *made)]
    return ys, [0] * len(ys)


def _batched_exchange(
    _: Any, in_dims: tuple[Any, ...], xs: list[Tensor], anchor: Tensor, *about: Any
) -> tuple[list[Tensor], list[None]]:
    """An exchange is about one entry of the batch, and its lengths are those of all of them."""
    ones = [x if dim is None else x.select(dim, 0) for x, dim in zip(xs, in_dims[0], strict=True)]
    found = _OPS.exchange(ones, anchor, *about)
    return found, [None] * len(found)


_LIBRARY.impl("run", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("exchange", _exchange, "CompositeExplicitAutograd")
_LIBRARY.impl("apply", _apply, "CompositeImplicitAutograd")
torch.library.register_fake(f"{_NAMESPACE}::run", _run_fake, lib=_LIBRARY)
torch.library.register_fake(f"{_NAMESPACE}::exchange", _exchange_fake, lib=_LIBRARY)
torch.library.register_vmap(f"{_NAMESPACE}::apply", _batched, lib=_LIBRARY)
torch.library.register_vmap(f"{_NAMESPACE}::exchange", _batched_exchange, lib=_LIBRARY)
_TORCH.register_ordered_effect(_OPS.run.default)
_TORCH.register_ordered_effect(_OPS.exchange.default)
