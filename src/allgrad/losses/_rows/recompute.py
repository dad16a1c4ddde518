"""Functions whose intermediate tensors are computed again in backward, unless they are few.

Kept tensors take memory that grows with the scores, and save the time of computing these. Where they
are few, time is all that counts.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from allgrad._autograd.transforms import is_plain_autograd
from allgrad._core.torch_internals import (
    functorch_active,
    is_batched_gradient,
    never_traced,
    transform_names,
    version_of,
)
from allgrad.errors import ModeError
from allgrad.losses._computed_on import computed_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "KEPT_SCORES",
    "Pulled",
    "Unchanged",
    "inner_graph",
    "keeps",
    "pulled_by_graph",
    "recomputed",
]

# With some ten tensors of that many numbers, in float32, less than 100 MiB.
KEPT_SCORES = 1 << 21
# Of functions that keep a few such tensors, on a device: some 64 MiB each.
KEPT_SCORES_ON_DEVICES = 1 << 24


class Pulled(NamedTuple):
    """A result, and what gives the gradients by some tensors from that by the result; it can be asked once."""

    result: Tensor
    pull: Callable[[Tensor], Sequence[Tensor | None]]

    @staticmethod
    def by_graph(
        function: Callable[..., Tensor], inputs: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Pulled:
        """By autograd."""
        result, pull = pulled_by_graph(function, inputs, needed)
        return Pulled(result.detach(), pull)


Once: TypeAlias = "Callable[..., Pulled | None]"


def recomputed(
    function: Callable[..., Tensor],
    *inputs: Tensor | None,
    scores: int,
    once: Once | None = None,
) -> Tensor:
    """``function(*inputs)``, of which only the inputs are kept for backward.

    ``scores`` is how many scores the whole loss has on this rank. If these are few, an eager backward
    uses the tensors of forward (once; another one computes them again). ``once(needed, *inputs)`` gives the
    same result with its gradients, by inputs that need one: those of eager autograd without a graph. It may
    give None, where autograd must do it.

    Backward is a function of the inputs and the incoming gradient, which is recomputed in the same
    way. So derivatives of any order need the intermediate tensors of one call at a time. The
    function must not communicate, and runs without autocast. It gets every tensor that it uses as an
    input, whole numbers too: one that it held would belong to a transform of torch.func that has
    ended when backward runs (test_func_transforms_of_whole_numbers). The first input is a tensor.
    """
    # Torch differentiates the jvp of an autograd.Function in reverse mode only; in forward mode it gives zeros.
    if functorch_active() and transform_names().count("Jvp") > 1:
        raise ModeError(
            "a loss in chunks: it has no forward mode inside forward mode (jvp of jvp).\n"
            "Take one of the two derivatives with torch.func.grad or vjp."
        )
    if torch.is_grad_enabled() and is_plain_autograd():
        keeps_few = once is not None and keeps(scores, _device(inputs))
        is_kept = keeps_few or scores <= KEPT_SCORES
        found: Tensor = _Eager.apply(function, once, is_kept, *inputs)  # type: ignore[no-untyped-call]
        return found
    (result,) = _recomputed_tuple(lambda *xs: (function(*xs),), inputs)
    return result


def keeps(scores: int, device: torch.device) -> bool:
    """Whether so few scores are kept, by a function that keeps a few tensors of them."""
    return scores <= (KEPT_SCORES if device.type == "cpu" else KEPT_SCORES_ON_DEVICES)


@contextmanager
def inner_graph() -> Iterator[None]:
    """Record a graph inside an autograd.Function, without the caller's hooks for saved tensors.

    A checkpoint would compute its region once more for it (test_a_checkpointed_region_is_computed_twice).
    """
    # Detached: a node that saved its own result would never be freed (test_a_graph_that_is_dropped_is_freed).
    hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        with suppress(RuntimeError):  # hooks are forbidden here, so there are none
            stack.enter_context(hooks)
        yield


@never_traced
class _Eager(torch.autograd.Function):
    """The function with a graph of its own inside, or its gradients, for one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        once: Once | None,
        is_kept: bool,
        *inputs: Tensor | None,
    ) -> Tensor:
        ctx.functions, needed = (function, once), ctx.needs_input_grad[3:]
        ctx.save_for_backward(*inputs)
        found, ctx.kept = None, None
        if once is not None or is_kept:
            given = [None if x is None else x.detach() for x in inputs]
            found = computed_on(_device(inputs), _pulled, function, once, given, needed, is_kept)
        if found is None:
            return computed_on(_device(inputs), function, *inputs)  # type: ignore[no-any-return]
        if is_kept:
            # Not the result: what holds its own graph would never be freed (test_a_graph_that_is_dropped_is_freed).
            ctx.kept = found.pull, Unchanged(given)
        return found.result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, by_result: Tensor) -> tuple[Tensor | None, ...]:
        (function, once), inputs = ctx.functions, ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        kept, ctx.kept = ctx.kept, None
        if torch.is_grad_enabled() or functorch_active() or is_batched_gradient(by_result):
            found = _pulled_back(lambda *xs: (function(*xs),), inputs, needed, [by_result])
            return None, None, None, *found
        device = by_result.device
        if kept is not None and kept[1]:
            pull = kept[0]
        else:
            pull = computed_on(device, _pulled, function, once, inputs, needed, True).pull
        return None, None, None, *computed_on(device, pull, by_result)


class Unchanged:
    """True as long as nobody changes these tensors in place; detached ones count the changes of the others.

    Autograd notices changes of what it saves, but not where hooks save copies: these are as they were, and what was
    made of the tensors and kept is not (test_inputs_that_hooks_copy_may_change).
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._versions = [(x, version_of(x)) for x in tensors if x is not None]

    def __bool__(self) -> bool:
        return all(version_of(x) == version for x, version in self._versions)


def _pulled(
    function: Callable[..., Tensor],
    once: Once | None,
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    has_graph: bool,
) -> Pulled | None:
    """The result and its gradients, by ``once`` or by autograd; None without either."""
    with torch.no_grad():
        found = None if once is None else once(needed, *inputs)
    if found is not None or not has_graph:
        return found
    return Pulled.by_graph(function, inputs, needed)


def pulled_by_graph(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Any, Callable[[Tensor], list[Tensor | None]]]:
    """The function's result, with a graph; if it is a tensor or begins with one, the gradients by that."""
    leaves = [
        x.detach().requires_grad_() if n and x is not None else x
        for x, n in zip(inputs, needed, strict=True)
    ]
    with inner_graph():
        result = function(*leaves)
    output: Tensor = result if isinstance(result, Tensor) else result[0]

    def pull(by_output: Tensor) -> list[Tensor | None]:
        wanted = [x for x, n in zip(leaves, needed, strict=True) if n and x is not None]
        if output.requires_grad:
            found = torch.autograd.grad(output, wanted, by_output, materialize_grads=True)
        else:
            found = tuple(torch.zeros_like(x) for x in wanted)
        gradients = iter(found)
        return [next(gradients) if n else None for n in needed]

    return result, pull


def _device(inputs: Sequence[Tensor | None]) -> torch.device:
    first = inputs[0]
    assert first is not None
    return first.device


def _recomputed_tuple(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = _Recomputed.apply(function, *inputs)  # type: ignore[no-untyped-call]
    return found


@never_traced
class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        function: Callable[..., tuple[Tensor, ...]], first: Tensor, *others: Tensor | None
    ) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = computed_on(first.device, function, first, *others)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *_pulled_back(ctx.function, ctx.saved_tensors, needed, gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors
        floating = [x is not None and x.is_floating_point() for x in inputs]
        function, chosen = _by_some(ctx.function, inputs, floating)
        given = (t for t, f in zip(tangents[1:], floating, strict=True) if f)  # less the function's
        moved = tuple(
            torch.zeros_like(x) if t is None else t for x, t in zip(chosen, given, strict=True)
        )
        found: tuple[Tensor, ...] = computed_on(chosen[0].device, _jvp, function, chosen, moved)
        return found

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *args: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        function, *inputs = args
        mapped = torch.func.vmap(function, in_dims=in_dims[1:], randomness=info.randomness)
        found = _recomputed_tuple(mapped, inputs)
        return found, (0,) * len(found)


def _pulled_back(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    gradients: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradients by the inputs, as a function of these that is recomputed too."""

    def pulled_back(*tensors: Tensor) -> tuple[Tensor, ...]:
        xs, cotangents = tensors[: len(inputs)], tensors[len(inputs) :]
        return _vjp(*_by_some(function, xs, needed), cotangents)

    found = iter(_recomputed_tuple(pulled_back, [*inputs, *gradients]))
    return [next(found) if n else None for n in needed]


def _by_some(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    chosen: Sequence[bool],
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """The function of the chosen inputs alone, and these."""

    def of_chosen(*moved: Tensor) -> tuple[Tensor, ...]:
        rest = iter(moved)
        return function(*(next(rest) if c else x for x, c in zip(inputs, chosen, strict=True)))

    return of_chosen, [x for x, c in zip(inputs, chosen, strict=True) if c and x is not None]


def _jvp(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], moved: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The derivative along ``moved``, in reverse mode: forward mode does not nest.

    The gradient is linear in the cotangents, and the derivative by them is the forward one.
    """
    value, pull = torch.func.vjp(function, *inputs)[:2]
    zeros = tuple(torch.zeros_like(y) for y in value)
    push = torch.func.vjp(lambda *cotangents: pull(cotangents), *zeros)[1]
    found: tuple[Tensor, ...] = push(moved)
    return found


def _vjp(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    if functorch_active():
        found: tuple[Tensor, ...] = torch.func.vjp(function, *inputs)[1](tuple(cotangents))
        return found
    # Torch's vjp refuses to run inside hooks for saved tensors, such as save_on_cpu.
    graph = torch.is_grad_enabled()  # when this function is itself being differentiated
    # Below torch.func in inference mode autograd would record nothing: the gradients would be zeros
    # (test_gradients_inside_inference_mode).
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [
            x.view_as(x) if graph and x.requires_grad else x.detach().requires_grad_()
            for x in inputs
        ]
        outputs = function(*leaves)
        pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
        ys, gs = [y for y, _ in pairs], [g for _, g in pairs]
        return torch.autograd.grad(ys, leaves, gs, create_graph=graph, materialize_grads=True)
