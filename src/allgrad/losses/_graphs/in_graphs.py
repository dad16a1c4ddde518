"""Losses under torch.compile: one op in the graph, or a graph break where no op can stand."""

from __future__ import annotations

from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec, cast

import torch
from torch import Tensor

from allgrad._autograd.transforms import in_lockstep
from allgrad._core.torch_internals import dual_level, functorch_active, is_recorded, never_traced
from allgrad.errors import ModeError
from allgrad.losses._inference_tensors import of_autograd

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType

__all__ = ["EAGER", "in_graphs"]

P = ParamSpec("P")

EAGER: dict[str, Callable[..., Tensor]] = {}  # the losses by name, as ops run them


def in_graphs(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Let a graph hold the loss as one op, whose backward is another (``graph_op``).

    The op has first derivatives by autograd. Inside torch.func, in forward mode and in a lockstep
    block the loss runs between two graphs, in eager code, which has every derivative.
    """
    name = loss.__name__
    EAGER[name] = never_traced(loss)
    first = next(iter(signature(loss).parameters))

    @wraps(loss)
    def call(*args: Any, **options: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            if is_recorded():
                raise ModeError(
                    f"{name}: make_fx and torch.func.linearize would record its kernels, and none of "
                    "its messages.\nUse torch.compile, or torch.func.jvp."
                )
            args, options = of_autograd(args, options)
            return loss(*args, **options)
        if functorch_active() or dual_level() >= 0 or in_lockstep() or _any_nested(args):
            from allgrad._autograd import graph_breaks

            between: Tensor = graph_breaks.run_loss(loss, *args, **options)
            return between
        from allgrad.losses._graphs import graph_op

        if first in options:  # the op has the dtype and the device of its first tensor
            args = options.pop(first), *args
        return graph_op.trace(name, args, options)

    # Code of its own: TorchDynamo gives up on code, and so on all losses if they shared it
    # (test_a_loss_that_falls_back_leaves_the_others_compiled).
    function = cast("FunctionType", call)
    function.__code__ = function.__code__.replace(co_name=name)
    return cast("Callable[P, Tensor]", call)


def _any_nested(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.is_nested for x in args)
