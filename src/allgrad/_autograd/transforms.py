"""From an adjoint pair to a differentiable function, in every mode of differentiation.

| mode | what runs |
|---|---|
| no graph, no transform | the pair's map |
| autograd | an autograd.Function with a backward |
| torch.func, dual numbers, nested as you like | one with every rule |
| the same under ``grad="none"`` | one without derivative |
| torch.compile, fake and meta tensors | an op that runs the pair's map (graph_ops), with every rule |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from allgrad._autograd import call_order, checkpoints, started_calls
from allgrad._autograd.call_order import THREAD
from allgrad._core.partition import dense
from allgrad._core.torch_internals import (
    FakeTensor,
    VmapInterpreter,
    add_batch_dim,
    anchor_gradient,
    any_autocast,
    below_view_tracking,
    current_interpreter,
    dispatch_modes,
    dual_level,
    functorch_active,
    inside_jvp,
    is_batched_gradient,
    is_recorded,
    never_traced,
    rebatch,
    transform_names,
    unbatch,
    unwrap_if_dead,
    wrap_for_grad,
)
from allgrad.errors import ModeError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

    from allgrad._autograd.adjoint_pair import AdjointPair

__all__ = [
    "ANCHOR",
    "apply",
    "apply_adjoint",
    "copy_handed_through",
    "has_only_shape",
    "in_lockstep",
    "is_plain_autograd",
    "mode_anchor",
    "needs_graph",
    "order_with",
    "run_map",
]

# A result requires grad on every rank, even where the local piece does not: another rank's piece
# may, and its backward needs every rank (test_piece_without_gradient_takes_part). Autograd marks a
# result when some input requires grad; this one always does, is empty, and gets no gradient that
# anybody reads (anchor_gradient).
ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
_STATE, _STARTED, _STRIDED = call_order.STATE, started_calls.STATE, torch.strided


def apply(
    pair: AdjointPair, xs: Sequence[Tensor], *, stop: bool = False, in_backward: bool = False
) -> tuple[Tensor, ...]:
    """Run the pair's map, differentiable to any order; ``stop`` ends the derivative there."""
    if torch.compiler.is_compiling() or (dispatch_modes() and is_recorded()):
        return _trace(pair, xs, stop=stop)
    transformed = functorch_active() or dual_level() >= 0
    if _STARTED.count and pair.call is not None and not transformed:
        started_calls.finish(pair.call.group)
    if stop or not (xs[0].is_floating_point() or _differentiable(xs)):
        if not transformed and not (stop and torch.is_grad_enabled() and _require_grad(xs)):
            return _plain(pair, xs)
        with torch.no_grad():
            return _run(_Constant, pair, xs) if transformed else _plain(pair, xs)
    chain = _find_chain() if _find_chain is not None and torch.is_grad_enabled() else None
    if chain is not None:
        if transformed:
            raise ModeError(
                f"{pair.name}: lockstep orders the backward of autograd, not of torch.func or "
                "forward mode.\nUse those outside the lockstep block."
            )
        return chain.apply(pair, xs)
    if transformed:
        return _run(_Apply, pair, xs)
    if torch.is_grad_enabled():
        alive = tuple(map(unwrap_if_dead, xs))
        anchor = None if alive[0].requires_grad else ANCHOR
        results: tuple[Tensor, ...] = _reverse(pair, anchor, *alive)  # type: ignore[no-untyped-call]
        return call_order.gate(results) if _STATE.gated and pair.call is not None else results
    return _plain(pair, xs, in_backward=in_backward)


def apply_adjoint(pair: AdjointPair, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same for the pair's adjoint, in backward."""
    return _apply_to_batch(pair.adjoint, gradients)


def _apply_to_batch(pair: AdjointPair, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The pair on gradients or tangents, which may be sparse, or a batch of torch's first vmap."""
    for x in xs:
        if is_batched_gradient(x):
            return rebatch(apply(pair, unbatch(xs)))
        if x.layout is not _STRIDED:
            return apply(pair, dense(xs), in_backward=True)
    return apply(pair, xs, in_backward=True)


class _Chain(Protocol):
    """What runs the calls of a lockstep block."""

    def apply(self, pair: AdjointPair, xs: Sequence[Tensor]) -> tuple[Tensor, ...]: ...


_find_chain: Callable[[], _Chain | None] | None = None  # while some thread is in a block


def order_with(find_chain: Callable[[], _Chain | None] | None) -> None:
    """Let the chain of a thread, if any, run its calls of eager autograd; ``None`` ends it."""
    global _find_chain  # noqa: PLW0603
    _find_chain = find_chain


def in_lockstep() -> bool:
    """Tell whether a lockstep block orders the calls of this thread; in a graph, of any thread."""
    return _find_chain is not None and (is_compiling() or _find_chain() is not None)


@never_traced
def run_map(pair: AdjointPair, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the pair's map below view tracking: a view made inside an autograd.Function could not be
    changed in place by the caller (y /= 2). A tensor that is handed through stays as it is.
    """
    x = xs[0]
    if x.is_meta or (type(x) not in _PLAIN and has_only_shape(x)):
        return tuple(_shapes_alone(pair, xs))
    with below_view_tracking():
        return tuple(_without_autocast(pair, xs) if any_autocast() else pair.forward(xs))


def _without_autocast(pair: AdjointPair, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The map itself; autocast would change what it packs (test_autocast)."""
    with torch.autocast(xs[0].device.type, enabled=False):
        return pair.forward(xs)


def copy_handed_through(ys: Sequence[Tensor], xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Results with memory of their own, where autograd would not know that one is its input."""
    given = set(map(id, xs))
    return tuple([y.clone() if id(y) in given else y for y in ys])


def is_plain_autograd() -> bool:
    """Tell whether derivatives, if any, are those of eager autograd."""
    return not (is_compiling() or functorch_active() or dual_level() >= 0 or is_recorded())


def needs_graph(xs: Sequence[Tensor]) -> bool:
    """Tell whether eager autograd records what is done with these."""
    return torch.is_grad_enabled() and _differentiable(xs)


@never_traced
def _plain(
    pair: AdjointPair, xs: Sequence[Tensor], *, in_backward: bool = False
) -> tuple[Tensor, ...]:
    # A tensor that is handed through: the caller's own leaf would still require grad. Of a gradient
    # autograd must see that it is the same tensor: it takes the memory of one that nobody else holds
    # (test_gradients_share_no_memory).
    if len(xs) == 1:
        x = xs[0]
        if x.is_meta or (type(x) not in _PLAIN and has_only_shape(x)):
            (y,) = _shapes_alone(pair, xs)
        else:
            (y,) = _without_autocast(pair, xs) if any_autocast() else pair.forward(xs)
        return (y.detach() if y is x and not in_backward else y,)
    # Not as views of one message: changing one in place would spoil the others' backward.
    given = set() if in_backward else set(map(id, xs))
    return tuple([y.detach() if id(y) in given else y for y in run_map(pair, xs)])


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def has_only_shape(x: Tensor) -> bool:
    """Tell whether a tensor has no memory, so that nothing can be sent of it."""
    return (type(x) not in _PLAIN and isinstance(x, FakeTensor)) or x.is_meta


def _shapes_alone(pair: AdjointPair, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    from allgrad._autograd import graph_ops

    return pair.forward(xs) if pair.made is None else graph_ops.run_plain(pair, xs)


def _run(function: type[_Apply], pair: AdjointPair, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    anchor = mode_anchor(tangents=function is _Apply)
    results: tuple[Tensor, ...] = function.apply(pair, anchor, *xs)  # type: ignore[no-untyped-call]
    return results


def _differentiable(xs: Sequence[Tensor]) -> bool:
    for x in xs:  # noqa: SIM110 - any() costs a generator in every call
        if x.is_floating_point() or x.is_complex():
            return True
    return False


def _require_grad(xs: Sequence[Tensor]) -> bool:
    for x in xs:  # noqa: SIM110
        if x.requires_grad:
            return True
    return False


def mode_anchor(*, tangents: bool) -> Tensor:
    """The anchor, in every mode that is on: with a batch, with a tangent.

    What holds for gradients holds for these too. A rank whose piece has no batch, or no tangent,
    takes part with copies, or with zeros (test_piece_without_batch_takes_part,
    test_piece_without_tangent_takes_part).
    """
    levels: set[str] = set()
    if tangents and dual_level() >= 0:
        # Dual numbers in or around func.grad: nothing tells which, so both levels get a tangent.
        levels = {"Jvp"} if inside_jvp() else {"Grad", ""}
    return _anchor_at(transform_names(), levels)


def _anchor_at(active: Sequence[str], with_tangent: Collection[str]) -> Tensor:
    if not active:
        return _with_tangent(ANCHOR) if "" in with_tangent else ANCHOR
    interpreter = current_interpreter()
    with interpreter.lower():
        below = _anchor_at(active[:-1], with_tangent)
    if isinstance(interpreter, VmapInterpreter):
        batch = below.expand(interpreter.batch_size(), 0)
        return add_batch_dim(batch, 0, interpreter.level())
    if active[-1] in with_tangent:
        return _with_tangent(wrap_for_grad(below, interpreter.level()))
    return below


def _with_tangent(x: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(x, torch.zeros_like(x))
    return dual


class _Apply(torch.autograd.Function):
    """The pair with every rule: backward, forward mode, batches."""

    @staticmethod
    @never_traced
    def forward(pair: AdjointPair, anchor: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return copy_handed_through(run_map(pair, xs), xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        ctx.pair = pair = inputs[0]
        if pair.call is not None:
            call_order.register(ctx, pair.call, inputs[2])
        checkpoints.mark(ctx)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        checkpoints.come_to(ctx)
        if ctx.pair.call is not None:
            call_order.check(ctx, ctx.pair.call)
        return None, anchor_gradient(ctx), *apply_adjoint(ctx.pair, gradients)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        pair: AdjointPair,
        anchor: Tensor,  # noqa: ARG004
        *xs: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _run(_Apply, pair, _batched(info, in_dims[2:], xs)), (-1,) * len(xs)

    @staticmethod
    def jvp(ctx: Any, _pair: None, _anchor: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(_apply_to_batch(ctx.pair, tangents))


@call_order.ordered
class _Reverse(torch.autograd.Function):
    """The pair with a backward only: of a function with ``setup_context`` torch reads the signature in every call."""

    @staticmethod
    def forward(
        ctx: Any,
        pair: AdjointPair,
        anchor: Tensor | None,  # noqa: ARG004
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.pair, made = pair, pair.made
        # While one thread makes the calls, on the host, their place needs no record.
        if made is not None:
            group = made.call.group
            if group.size > 1 and (
                group.thread is not THREAD.token or _STATE.gated or not xs[0].is_cpu
            ):
                call_order.register(ctx, made.call, xs[0])
        results = run_map(pair, xs)
        checkpoints.mark(ctx)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        checkpoints.come_to(ctx)
        pair = ctx.pair
        if pair.made is not None and pair.made.call.size > 1:
            call_order.check(ctx, pair.made.call)
        return None, anchor_gradient(ctx), *apply_adjoint(pair, gradients)


# The same as _Reverse.apply outside of torch.func, less what that one does in Python.
_reverse = super(torch.autograd.Function, _Reverse).apply


class _Constant(_Apply):
    """The same map with derivative zero in every mode, without a message for it."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        ctx.shapes = [y.shape for y in output]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:  # noqa: ARG004
        return (None,) * (2 + len(gradients))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        pair: AdjointPair,
        anchor: Tensor,  # noqa: ARG004
        *xs: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _run(_Constant, pair, _batched(info, in_dims[2:], xs)), (-1,) * len(xs)

    @staticmethod
    def jvp(ctx: Any, _pair: None, _anchor: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.new_zeros(shape) for t, shape in zip(tangents, ctx.shapes, strict=True))


def _batched(info: Any, dims: Sequence[int | None], xs: Sequence[Tensor]) -> list[Tensor]:
    """The batch goes last: pairs name dimensions from the front, so it travels along unseen."""
    return [
        x.unsqueeze(-1).repeat_interleave(info.batch_size, -1)  # real memory, as for any piece
        if dim is None
        else x.movedim(dim, -1)
        for x, dim in zip(xs, dims, strict=True)
    ]


def _trace(pair: AdjointPair, xs: Sequence[Tensor], *, stop: bool) -> tuple[Tensor, ...]:
    """The same under torch.compile: an op in the graph, with every derivative of its own."""
    tied = in_lockstep() and not stop and torch.is_grad_enabled() and _differentiable(xs)
    if tied and pair.made is not None:
        from allgrad._autograd import graph_ops

        return graph_ops.run_in_lockstep(pair, xs)  # type: ignore[no-any-return]
    if stop:
        with torch.no_grad():
            return tuple(_in_graph(pair, [x.detach() for x in xs]))
    active = transform_names() if functorch_active() else ()
    duals = dual_level() >= 0 and active[-1:] in {(), ("Jvp",)}
    if not duals or not _differentiable(xs):
        return tuple(_in_graph(pair, xs))
    split = [_split_dual(x) for x in xs]
    ys = _in_graph(pair, [value for value, _ in split])
    dys = _in_graph(pair, [tangent for _, tangent in split])
    return tuple(forward_ad.make_dual(y, dy) for y, dy in zip(ys, dys, strict=True))


def _in_graph(pair: AdjointPair, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    from allgrad._autograd import graph_ops

    return pair.forward(xs) if pair.made is None else graph_ops.run(pair, xs)


def _split_dual(x: Tensor) -> tuple[Tensor, Tensor]:
    """A value and its tangent, zeros where it has none: every rank sends tangents."""
    value, tangent = forward_ad.unpack_dual(x)
    return value, torch.zeros_like(value) if tangent is None else tangent
