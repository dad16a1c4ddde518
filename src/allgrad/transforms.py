"""From an adjoint pair to a differentiable function, in whichever mode the caller is.

| mode | what runs |
|---|---|
| no graph, no transform | the pair's map |
| autograd, torch.func, dual numbers, nested as you like | an autograd.Function |
| forward mode under torch.compile | the pair on values and on tangents |
| what torch.compile would get wrong | a clear refusal |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from allgrad.errors import ModeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from allgrad.adjoint_pair import AdjointPair

__all__ = ["apply"]

# A result requires grad on every rank, even where the local piece does not: another rank's piece
# may, and its backward needs everyone (test_piece_without_gradient_takes_part). Autograd marks a
# result when some input requires grad; this one always does, is empty, and never gets a gradient.
_ANCHOR = torch.empty(0, requires_grad=True)


def apply(pair: AdjointPair, xs: Sequence[Tensor], *, stop: bool = False) -> tuple[Tensor, ...]:
    """Run the pair's map, differentiable to any order; ``stop`` ends the derivative there."""
    active = _active_transforms() if torch._C._are_functorch_transforms_active() else ()  # noqa: SLF001
    duals = forward_ad._current_level >= 0 and active[-1:] in {(), ("Jvp",)}  # noqa: SLF001
    compiling = torch.compiler.is_compiling()
    if compiling and active:
        _refuse_what_compile_gets_wrong(pair, active)
    if stop:
        with torch.no_grad():
            return apply(pair, [_without_derivative(x, active, duals=duals) for x in xs])
    if not duals or not _differentiable(xs):
        return _apply_function(pair, xs)
    split = [_split_dual(x) for x in xs]
    if compiling:
        ys = _apply_function(pair, [value for value, _ in split])
        dys = _apply_function(pair, [tangent for _, tangent in split])
        return tuple(forward_ad.make_dual(y, dy) for y, dy in zip(ys, dys, strict=True))
    return _apply_function(pair, [forward_ad.make_dual(value, t) for value, t in split])


def _apply_function(pair: AdjointPair, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    transformed = torch._C._are_functorch_transforms_active()  # noqa: SLF001
    traced = _differentiable(xs) and (torch.is_grad_enabled() or forward_ad._current_level >= 0)  # noqa: SLF001
    if not transformed and not traced:
        return tuple(pair.forward(xs))
    function = _InGraph if torch.compiler.is_compiling() else _Apply
    results: tuple[Tensor, ...] = function.apply(pair, _ANCHOR, *xs)  # type: ignore[no-untyped-call]
    return results


def _differentiable(xs: Sequence[Tensor]) -> bool:
    return any(x.is_floating_point() or x.is_complex() for x in xs)


def _split_dual(x: Tensor) -> tuple[Tensor, Tensor]:
    """A value and its tangent, zeros where it has none.

    In forward mode every rank sends tangents: another rank's piece may have some
    (test_piece_without_tangent_takes_part).
    """
    value, tangent = forward_ad.unpack_dual(x)
    return value, torch.zeros_like(value) if tangent is None else tangent


class _InGraph(torch.autograd.Function):
    """What torch.compile traces: it refuses a Function with a ``jvp``."""

    @staticmethod
    def forward(pair: AdjointPair, anchor: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        # A view made in here could not be changed in place by the caller (y /= 2), so the results
        # are unlinked from their bases. What is handed through as it is stays linked to its input.
        return tuple(
            y if any(y is x for x in xs) else torch.ops.aten._unsafe_view(y, y.shape)  # noqa: SLF001
            for y in pair.forward(xs)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        ctx.pair = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():  # traced ahead of time, whatever is active by then
            return None, None, *_apply_function(ctx.pair.adjoint, gradients)
        return None, None, *apply(ctx.pair.adjoint, gradients)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        pair: AdjointPair,
        anchor: Tensor,  # noqa: ARG004
        *xs: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        # Pairs name dimensions from the front: one more at the end travels along unseen.
        batched = [
            x.unsqueeze(-1).expand(*x.shape, info.batch_size) if dim is None else x.movedim(dim, -1)
            for x, dim in zip(xs, in_dims[2:], strict=True)
        ]
        return _apply_function(pair, batched), (-1,) * len(xs)


class _Apply(_InGraph):
    """The same with forward mode."""

    @staticmethod
    def jvp(ctx: Any, _pair: None, _anchor: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return _apply_function(ctx.pair, tangents)


def _without_derivative(x: Tensor, active: tuple[str, ...], *, duals: bool) -> Tensor:
    if duals:
        value: Tensor = forward_ad.unpack_dual(x).primal
        return value
    if "Jvp" in active:
        stopped: Tensor = _Stop.apply(x)  # type: ignore[no-untyped-call]
        return stopped
    return x


class _Stop(torch.autograd.Function):
    """The identity, with derivative zero in every mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return torch.zeros_like(gradient)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # noqa: ARG004
        return torch.zeros_like(tangent)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _active_transforms() -> tuple[str, ...]:
    """The torch.func transforms around this call, the outermost first: "Grad", "Jvp", "Vmap"."""
    stack = torch._C._functorch.get_interpreter_stack() or ()  # noqa: SLF001
    return tuple(interpreter.key().name for interpreter in stack)


def _refuse_what_compile_gets_wrong(pair: AdjointPair, active: tuple[str, ...]) -> None:
    """Dynamo drops the batching rule and the forward mode of a Function; raise before it does."""
    if "Vmap" in active:
        raise ModeError(
            f"{pair.name}: torch.compile cannot trace a collective inside torch.func.vmap, jacfwd "
            "or hessian.\nCompile the function inside the vmap, or run this part eagerly."
        )
    if "Jvp" in active[:-1]:
        raise ModeError(
            f"{pair.name}: torch.compile cannot trace a collective inside {active[-1].lower()} "
            "inside torch.func.jvp.\nPut jvp innermost, or run this part eagerly."
        )
