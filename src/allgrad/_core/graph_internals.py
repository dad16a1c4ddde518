"""Private names of torch that only ops in compiled graphs need; imported with the first graph.

Each stands with what it is for and, where it can be done without, what happens then.
"""

from __future__ import annotations

import re
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from allgrad._core.torch_internals import constant_in_graphs

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["compiled_backward_creates_graph", "forget_own_guards", "graph_internals"]


def graph_internals() -> SimpleNamespace:
    """What ops in a compiled graph are made with, looked up when the first one is made."""
    from torch._functorch.utils import enable_single_level_autograd_function
    from torch._higher_order_ops import effects
    from torch.autograd.forward_ad import _set_fwd_grad_enabled
    from torch.autograd.function import _SingleLevelFunction

    ordered = effects._EffectType.ORDERED
    without_lowering: list[Any] = []

    def register_ordered_effect(op: Any) -> None:
        """Keep the op, in its place among the others, wherever a graph goes."""
        effects._register_effectful_op(op, ordered)
        without_lowering.append(op)

    def keep_order_in_inductor() -> None:
        """Give our ops lowerings of their own, once Inductor is imported. Called in their fake kernels."""
        lowering = sys.modules.get("torch._inductor.lowering") if without_lowering else None
        while lowering is not None and without_lowering:
            op = without_lowering.pop()
            lowering.register_lowering(op, type_promotion_kind=None)(in_order(lowering, op))

    def in_order(lowering: Any, op: Any) -> Any:
        make = lowering.fallback_handler(op, add_to_fallback_set=False)

        def lower(*args: Any) -> Any:
            # Inductor files what an effect comes after under a name by which its scheduler does not
            # look for it (pytorch/pytorch#189209), and moves calls (test_inductor_moves_no_call).
            graph = lowering.V.graph
            first, before = len(graph.operations), graph.effectful_ops.get(ordered)
            made = make(*args)
            if before is not None:
                for operation in graph.operations[first:]:
                    after = graph.additional_buffer_deps[operation.get_operation_name()]
                    after.add(before.get_name())
            return made

        return lower

    def unbacked_size() -> Any:
        """A length that is known when the graph runs. Called in an op's fake kernel."""
        # new_dynamic_size of the public context asks for a setting of TorchDynamo's first.
        env = torch.library.get_ctx()._shape_env
        if env is None:
            raise RuntimeError("allgrad: sizes are found out in graphs only")
        size = env.create_unbacked_symint()
        torch._check(size >= 0)
        return size

    def with_autograd() -> Any:
        """Record a graph inside an op, which may be called below autograd."""
        key, keys = torch._C.DispatchKey, torch._C.DispatchKeySet
        own = keys(key.AutogradFunctionality) | keys(key.AutogradOther)
        own = own | keys(key.AutogradNestedTensor) | keys(key.ADInplaceOrView)
        included = torch._C._dispatch_tls_local_include_set() | keys(key.ADInplaceOrView)
        excluded = torch._C._dispatch_tls_local_exclude_set() - own
        return torch._C._ForceDispatchKeyGuard(included, excluded)

    return SimpleNamespace(
        with_autograd=with_autograd,
        is_wrapped=torch._C._functorch.is_functorch_wrapped_tensor,
        below_autograd=torch._C._AutoDispatchBelowAutograd,
        SingleLevelFunction=_SingleLevelFunction,
        enable_single_level=enable_single_level_autograd_function,
        set_fwd_grad_enabled=_set_fwd_grad_enabled,
        register_ordered_effect=register_ordered_effect,
        keep_order_in_inductor=keep_order_in_inductor,
        unbacked_size=unbacked_size,
    )


@constant_in_graphs
def forget_own_guards() -> None:
    """Take out of the graph's guards those on allgrad's own functions, classes and modules.

    TorchDynamo checks everything that a traced line names, before each call of a compiled function:
    more than a hundred checks for one collective, of what no program changes. It leaves out those on
    the standard library for the same reason. Without it: they stay, and take some 30 microseconds.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    guards = context.guards_context.dynamo_guards.inner
    for guard in [guard for guard in guards if _is_on_own_code(guard.name)]:
        guards.remove(guard)


_OWN_NAME = re.compile(r"(?:dict\()?G\['__import_(allgrad(?:_dot_\w+)?)'\]((?:\.\w+)*)(.*)")


def _is_on_own_code(name: str) -> bool:
    """Of data, such as the lockstep block or the default group, guards are needed."""
    found = _OWN_NAME.fullmatch(name)
    if found is None:
        return False
    value: Any = sys.modules.get(found[1].replace("_dot_", "."))
    for step in found[2].split(".")[1:]:
        if step == "__dict__":  # what a class of ours defines
            return str(getattr(value, "__module__", "")).startswith("allgrad.")
        value = getattr(value, step, None)
        if isinstance(value, (FunctionType, BuiltinFunctionType)):
            return value.__name__ == step  # one under another name may be state
    return not found[3] and isinstance(value, (ModuleType, type))


def compiled_backward_creates_graph() -> bool:
    """Tell whether a compiled backward runs with ``create_graph=True``, called from inside of it.

    AOTAutograd runs it without grad mode then, inside a function whose own backward raises; but where
    autograd prunes that one, a second derivative is left out in silence. The function is known by the
    name of an argument. Without it: torch's own refusal, where it is not pruned.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and "double_ctx" in code.co_varnames[: code.co_argcount]:
            return True
        frame = frame.f_back
    return torch.is_grad_enabled()
