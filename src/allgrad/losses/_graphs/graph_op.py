"""A loss in a compiled graph: one op that runs the eager loss, and one that runs its backward.

    forward     arguments  --- value --->  loss, ticket
    backward    gradient of the loss, ticket  --- gradient --->  gradients of the arguments

The ops run eager code, so that a rank puts the same messages on the wire whether it compiled the
loss or not, and ``checked`` and ``deadline`` hold. While a graph is traced they only tell shapes.
What forward keeps for backward is the eager graph. It lives as long as the memory of the ticket, a
tensor that the graph keeps from forward to backward (test_graph_dropped_without_backward_is_freed).
"""

from __future__ import annotations

import ctypes
import itertools
from ast import literal_eval
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_scalar

from allgrad._autograd.transforms import ANCHOR
from allgrad._core.graph_internals import compiled_backward_creates_graph, graph_internals
from allgrad._core.torch_internals import (
    never_traced,
    process_group_named,
)
from allgrad._wire.calls import at_site, resolve, traced_site
from allgrad.errors import ModeError, SizesError
from allgrad.losses._graphs.in_graphs import EAGER
from allgrad.losses.key_queue import KeyQueue, QueuedKeys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["trace"]

# torch keeps compiled graphs on disk and finds them by the names of their ops. Raise this number
# when a schema or a derivative changes.
_NAMESPACE = "allgrad_losses_3"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_OPS = getattr(torch.ops, _NAMESPACE)
_SENDS = (torch.Tag.nondeterministic_seeded,)
_LOSS = "str name, str arguments, SymInt[] numbers, str group, str site"
_LIBRARY.define(f"loss(Tensor[] xs, Tensor anchor, {_LOSS}) -> Tensor[]", tags=_SENDS)
_LIBRARY.define(
    f"value(Tensor[] xs, Tensor anchor, bool grad, bool[] needs, {_LOSS}) -> Tensor[]", tags=_SENDS
)
_LIBRARY.define("gradient(Tensor by_loss, Tensor ticket, Tensor[] xs) -> Tensor[]", tags=_SENDS)
_TORCH = graph_internals()


def trace(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """The loss as a node of the graph that is being traced."""
    xs: list[Tensor] = []
    arguments: list[str] = []
    sizes: list[int] = []
    group = None
    for key, value in [*(("", value) for value in args), *options.items()]:
        if key == "group":
            group = value
        elif key == "sizes" and value is not None and not isinstance(value, str):
            if hasattr(value, "dtype"):
                kind = type(value).__name__
                raise SizesError(f"{name}: sizes is a {kind}.\nGive ints in a compiled function.")
            arguments.append(f"sizes {len(value)} of sizes")
            sizes += list(value)
        else:
            tensors, kind = _described(value)
            xs += tensors
            arguments.append(f"{key} {len(tensors)} {kind}")
    per_row = options.get("reduction") == "none"  # of cross_entropy, whose targets are third
    shape = list((args[2] if len(args) > 2 else options["targets"]).shape) if per_row else []
    numbers = [len(shape), *shape, *sizes]  # torch.library wants no empty list
    made = name, "\n".join(arguments), numbers, resolve(name, group).group.name, traced_site()
    # The anchor lets every rank take part in backward, even one whose tensors need no gradient.
    loss: Tensor = _OPS.loss(xs, ANCHOR, *made)[0]
    return loss


def _described(value: Any) -> tuple[list[Tensor], str]:
    """The tensors of an argument, and how to rebuild it from them.

    A number that changes from call to call is a symbol of TorchDynamo's, which has no text; as a
    constant of the graph it has one (test_another_python_number_is_another_graph).
    """
    if isinstance(value, Tensor):
        return [value], "tensor"
    if isinstance(value, (np.ndarray, np.generic)):  # for TorchDynamo a number is an array too
        return [torch.as_tensor(value)], "number"
    if isinstance(value, float):
        return [], f"float {guard_scalar(value)!r}"  # infinity is no literal
    if isinstance(value, int) and not isinstance(value, bool):
        return [], f"literal {guard_scalar(value)!r}"
    if isinstance(value, KeyQueue):
        held = [value.features, value.count]
        return (held, "queue") if value.ids is None else ([*held, value.ids], "queue")
    if isinstance(value, (list, tuple)):
        return list(value), "list"
    return [], f"literal {value!r}"


def _arguments(
    xs: Sequence[Tensor], arguments: Sequence[str], sizes: Sequence[int]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the eager loss, from what the node keeps."""
    args: list[Any] = []
    options: dict[str, Any] = {}
    rest: Iterator[Tensor] = iter(xs)
    for text in arguments:
        key, count, kind = text.split(" ", 2)
        tensors = [] if kind == "of sizes" else [next(rest) for _ in range(int(count))]
        value: Any = tensors
        if kind == "of sizes":
            value = list(sizes)
        elif kind == "tensor":
            (value,) = tensors
        elif kind == "number":
            value = tensors[0].tolist()
        elif kind.startswith("float "):
            value = float(kind.removeprefix("float "))
        elif kind == "queue":
            value = QueuedKeys(*tensors)
        elif kind.startswith("literal "):
            value = literal_eval(kind.removeprefix("literal "))
        if key:
            options[key] = value
        else:
            args.append(value)
    return args, options


class _EagerGraph(ctypes.c_int64):
    """The loss in eager autograd and its leaves; the number of a ticket, and its memory."""

    loss: Tensor
    leaves: list[Tensor]
    name: str


_numbers = itertools.count(1)
_graphs: WeakValueDictionary[int, _EagerGraph] = WeakValueDictionary()


@never_traced
def _value(  # noqa: PLR0917
    xs: list[Tensor],
    anchor: Tensor,  # noqa: ARG001
    grad: bool,
    needs: list[bool],
    name: str,
    arguments: str,
    numbers: list[int],
    group: str,
    site: str,
) -> list[Tensor]:
    leaves = [_leaf(x, grad).requires_grad_(n) for x, n in zip(xs, needs, strict=True)]
    args, options = _arguments(leaves, arguments.split("\n"), numbers[1 + numbers[0] :])
    options["group"] = process_group_named(group) if group else None
    with torch.set_grad_enabled(grad), _TORCH.with_autograd(), at_site(site):
        loss = EAGER[name](*args, **options)
    graph = _EagerGraph(next(_numbers))
    if loss.requires_grad:
        graph.loss, graph.leaves = loss, [x for x in leaves if x.requires_grad]
        graph.name = name
        _graphs[graph.value] = graph
    # The tensor keeps the graph that it is made of.
    return [loss.detach().clone(), torch.frombuffer(graph, dtype=torch.int64)]


def _leaf(x: Tensor, grad: bool) -> Tensor:
    """A tensor for the eager graph: a copy, as Inductor uses the memory of an intermediate again."""
    return x.detach().clone() if grad and not isinstance(x, nn.Parameter) else x.detach()


def _value_fake(  # noqa: PLR0917
    xs: list[Tensor],
    anchor: Tensor,  # noqa: ARG001
    grad: bool,  # noqa: ARG001
    needs: list[bool],  # noqa: ARG001
    name: str,  # noqa: ARG001
    arguments: str,  # noqa: ARG001
    numbers: list[int],
    *_: str,
) -> list[Tensor]:
    _TORCH.keep_order_in_inductor()
    shape = numbers[1 : 1 + numbers[0]]
    dtype = torch.promote_types(xs[0].dtype, torch.float32)
    return [xs[0].new_empty(shape, dtype=dtype), torch.empty(1, dtype=torch.int64, device="cpu")]


@never_traced
def _gradient(
    by_loss: Tensor,
    ticket: Tensor,
    xs: list[Tensor],  # noqa: ARG001
) -> list[Tensor]:
    graph = _graphs[int(ticket)]
    if compiled_backward_creates_graph():
        raise _no_second_derivative(graph.name)
    # With the anchor no node is pruned: this rank takes part in every call of backward.
    wanted = [*graph.leaves, ANCHOR]
    with _TORCH.with_autograd():
        *found, _ = torch.autograd.grad(
            graph.loss, wanted, by_loss, retain_graph=True, materialize_grads=True
        )
    return [g.clone(memory_format=torch.contiguous_format) for g in found]


def _gradient_fake(
    by_loss: Tensor,  # noqa: ARG001
    ticket: Tensor,  # noqa: ARG001
    xs: list[Tensor],
) -> list[Tensor]:
    _TORCH.keep_order_in_inductor()
    return [x.new_empty(x.shape) for x in xs]


class _Loss(_TORCH.SingleLevelFunction):  # type: ignore[misc, name-defined]
    """The derivative of the op ``value``."""

    @staticmethod
    def forward(anchor: Tensor, made: tuple[Any, ...], *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(_OPS.value(list(xs), anchor, *made))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, (_, ctx.needs, ctx.name, *_), *xs = inputs
        ctx.save_for_backward(
            output[1], *(x for x, needed in zip(xs, ctx.needs, strict=True) if needed)
        )

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor, _: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise _no_second_derivative(ctx.name)
        ticket, *xs = ctx.saved_tensors
        found = iter(_OPS.gradient(by_loss, ticket, xs))
        return None, None, *(next(found) if needed else None for needed in ctx.needs)


def _no_second_derivative(name: str) -> ModeError:
    return ModeError(
        f"{name}: a compiled loss has first derivatives only.\nCall it outside of "
        "torch.compile where its gradient is differentiated again."
    )


def _loss(xs: list[Tensor], anchor: Tensor, *made: Any) -> list[Tensor]:
    # Asked where the op runs: an exported program may get other inputs than those of its trace.
    grad = torch.is_grad_enabled()
    needs = [grad and x.requires_grad for x in xs]
    with _TORCH.enable_single_level():
        return list(_Loss.apply(anchor, (grad, needs, *made), *xs))


_LIBRARY.impl("loss", _loss, "CompositeImplicitAutograd")
_LIBRARY.impl("value", _value, "CompositeExplicitAutograd")
_LIBRARY.impl("gradient", _gradient, "CompositeExplicitAutograd")
torch.library.register_fake(f"{_NAMESPACE}::value", _value_fake, lib=_LIBRARY)
torch.library.register_fake(f"{_NAMESPACE}::gradient", _gradient_fake, lib=_LIBRARY)
_TORCH.register_ordered_effect(_OPS.value.default)
_TORCH.register_ordered_effect(_OPS.gradient.default)
