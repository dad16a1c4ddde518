"""Every private name of torch that allgrad uses, with its purpose and what happens without it.

No other file names one (test_private_names_of_torch_stand_in_one_place) but ``module_internals``, for
layers and wrappers, and ``graph_internals``, which has what only ops in compiled graphs need: a change
there breaks nobody who never compiles.
"""

from __future__ import annotations

from functools import partial, wraps
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta


P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")

# ---- layout of memory ------------------------------------------------------------------------
# One call of torch for many tensors. Without them: torch.cat of flat views, and split.
from torch._utils import _flatten_dense_tensors as flatten_dense
from torch._utils import _unflatten_dense_tensors as unflatten_dense

# Copies many tensors in one call. Without it: a loop of Tensor.copy_.
foreach_copy_ = torch._foreach_copy_


def cpu_capabilities() -> dict[str, object]:
    """What this CPU can do, by name. Before torch 2.12 by private names; without them: as if it could not."""
    public = getattr(torch.cpu, "get_capabilities", None)
    if public is not None:
        return dict(public())
    private = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_bf16": "_is_amx_tile_supported"}
    return {name: getattr(torch.cpu, ask, bool)() for name, ask in private.items()}


__all__ = [
    "FINDS_LENGTHS_IN_TRANSFORMS",
    "GATHER",
    "PROFILER",
    "PROFILING",
    "REDUCE_SCATTER",
    "AllgatherOptions",
    "FakeTensor",
    "ReduceScatterOptions",
    "VmapInterpreter",
    "add_batch_dim",
    "anchor_gradient",
    "any_autocast",
    "backend_device_types",
    "backend_for",
    "backend_timeout",
    "before_node",
    "below_view_tracking",
    "constant_in_graphs",
    "cpu_capabilities",
    "current_interpreter",
    "current_node",
    "dispatch_modes",
    "dual_level",
    "flatten_dense",
    "foreach_copy_",
    "functional_collectives",
    "functorch_active",
    "graph_task",
    "in_backward_pass",
    "in_selective_checkpoint",
    "inside_jvp",
    "is_batched_gradient",
    "is_recorded",
    "is_view",
    "is_zero_tensor",
    "lengths_differ",
    "never_traced",
    "node_class",
    "nodes_made",
    "pop_saved_tensor_hooks",
    "process_group_named",
    "push_saved_tensor_hooks",
    "rebatch",
    "saved_tensor_hooks",
    "sequence_number",
    "sequence_number_of",
    "set_sequence_number",
    "traced_frames",
    "transform_names",
    "unbatch",
    "unflatten_dense",
    "unrecorded",
    "unwrap_if_dead",
    "version_of",
    "will_run",
    "wrap_for_grad",
]

# ---- torch.func and forward mode -------------------------------------------------------------
# All of these tell which transforms are active around a call. Without them: autograd alone works.
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import VmapInterpreter
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter as current_interpreter,
)

functorch_active = torch._C._are_functorch_transforms_active
add_batch_dim = torch._C._functorch._add_batch_dim
wrap_for_grad = torch._C._functorch._wrap_for_grad
# A tensor that outlived its transform; without it such a tensor raises inside an autograd.Function.
unwrap_if_dead = torch._C._functorch.unwrap_if_dead


# What autograd.grad(is_grads_batched=True) hands to a backward: tensors of vmap's first version.
# Without them: that raises.
is_batched_gradient = torch._C._functorch.is_legacy_batchedtensor


def unbatch(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Batched gradients with their batch as the last dimension, copies where one has none."""
    level, size = _batch_level(), 1
    for g in gradients:
        if is_batched_gradient(g):
            size = torch._remove_batch_dim(g, level, 1, 0).shape[0]
    return [torch._remove_batch_dim(g, level, size, 0).movedim(0, -1) for g in gradients]


def rebatch(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The way back; of tangents torch wants the batch in front, in memory too."""
    level = _batch_level()
    return [torch._add_batch_dim(g.movedim(-1, 0).contiguous(), 0, level) for g in gradients]


def _batch_level() -> int:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


# The level of ``forward_ad.dual_level``; -1 outside. Read in every call, hence no function of ours.
dual_level = partial(getattr, forward_ad, "_current_level")


def inside_jvp() -> bool:
    """Tell whether some ``torch.func.jvp`` is active."""
    return bool(eager_transforms.JVP_NESTING)


def transform_names() -> tuple[str, ...]:
    """The torch.func transforms around this call, the outermost first: "Grad", "Jvp", "Vmap"."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return tuple(interpreter.key().name for interpreter in stack)


def constant_in_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Have TorchDynamo call a function once instead of tracing it.

    What torch.compiler.assume_constant_result does, without importing TorchDynamo for every user.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


transform_names = constant_in_graphs(transform_names)


def never_traced(what: T) -> T:
    """Have TorchDynamo leave a function alone, or those of a class, and all that they call.

    Beside a graph it traces whatever eager code runs, and fails on the calls into a process group. What
    is inlined into a graph is traced as ever. What torch.compiler.disable does, without a wrapper in
    every call, and without importing TorchDynamo for every user. Without it: what is compiled inside
    torch.func, or by compiled autograd, ends in errors of TorchDynamo's.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not hasattr(frames, "set_code_exec_strategy"):
        return what
    skip = frames._FrameAction.SKIP
    for function in vars(what).values() if isinstance(what, type) else [what]:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return what


# ---- autograd --------------------------------------------------------------------------------
# Runs ops below view tracking: a view made inside an autograd.Function could not be changed in
# place by the caller. Without it: a copy of every view.
below_view_tracking = torch._C._AutoDispatchBelowADInplaceOrView


def in_backward_pass() -> bool:
    """Tell whether this thread runs a backward pass. Without it: checked mode cannot tell."""
    return bool(graph_task() != -1)


# Whether autocast is on for some device. Without it: torch.is_autocast_enabled(device type), which takes
# as long as a twentieth of a small call.
any_autocast = torch._C._is_any_autocast_enabled
# The backward pass that this thread runs, the nodes that this thread has made, and whether a node
# belongs to the pass. Without them: the order of backward is not checked (call_order).
graph_task = torch._C._current_graph_task_id
nodes_made = torch._C._autograd._get_sequence_nr
will_run = torch._C._will_engine_execute_node
is_view = torch.Tensor._is_view


def version_of(x: torch.Tensor) -> int:
    """How often a tensor was changed in place; a tensor of inference mode does not tell.

    Without it: save_for_backward, whose check hooks for saved tensors switch off.
    """
    return -1 if x.is_inference() else x._version


def node_class(function: type[torch.autograd.Function]) -> type:
    """The class of the nodes of an autograd.Function."""
    found: type = function._backward_cls
    return found


# The number of a node among those of its thread. Read in every backward, hence no function of ours.
sequence_number_of: Callable[[Any], int] = methodcaller("_sequence_nr")


def set_sequence_number(node: Any, number: int) -> None:
    """Of the nodes that are ready, autograd runs the one with the highest number."""
    node._set_sequence_nr(number)


def before_node(node: Any, y: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call ``hook`` with the gradient of ``y`` before ``node``, which made ``y``, runs in backward.

    Without it: Tensor.register_hook, which takes four times as long.
    """
    y._backward_hooks = {0: hook}
    node._register_hook_dict(y)
    y._backward_hooks = None  # the node has it; the caller's own hooks go into another dict


def anchor_gradient(ctx: Any) -> torch.Tensor | None:
    """The gradient that a backward returns for an anchor (transforms.ANCHOR): None.

    Compiled autograd adds up the gradients of a tensor that several calls used, and cannot add None: it
    gets an empty tensor. It is known by the class of its ``ctx``. Without it: a program with two
    anchored calls raises under compiled autograd.
    """
    if type(ctx).__name__ == "FakeBackwardCFunction":
        return torch.empty(0, device="cpu")
    return None


# The node that backward runs, for a hook that cannot hold it: the node holds the hook.
# Without it: Node.register_hook in every call.
current_node: Callable[[], Any] = torch._C._current_autograd_node


# How many modes see the ops of this thread. Read in every call.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


# The stack of hooks for saved tensors, such as a checkpoint's: its top, None if there are none, and changes of
# it. Without them: what each rank computes behind a call decides whether a checkpoint makes it again.
saved_tensor_hooks: Any = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
pop_saved_tensor_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_tensor_hooks = torch._C._autograd._push_saved_tensors_default_hooks


def in_selective_checkpoint() -> bool:
    """Tell whether selective checkpointing notes which ops run, to find them again in backward.

    Without it: a call that is made in two ways there raises torch's error in backward.
    """
    if not dispatch_modes():
        return False
    from torch.utils import _python_dispatch, checkpoint

    modes = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
    return any(isinstance(m, modes) for m in _python_dispatch._get_current_dispatch_mode_stack())


def is_recorded() -> bool:
    """Tell whether make_fx or torch.func.linearize records what this thread computes.

    Without it: a graph that they make of real tensors has no messages, and gives wrong numbers.
    """
    if not dispatch_modes():
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def unrecorded(function: F) -> F:
    """Have them leave out what a function does: what it finds is a constant of the graph."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if not is_recorded():
            return function(*args, **options)
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        with disable_proxy_modes_tracing():
            return function(*args, **options)

    return cast("F", run)


# A tensor of zeros without memory, which forward mode hands on; nothing can be sent of it.
is_zero_tensor = torch.Tensor._is_zerotensor


# ---- profiler --------------------------------------------------------------------------------
# ``PROFILER[PROFILING]`` tells whether torch.profiler records. Read in every call, hence no function.
# Without it: calls have no names of ours in its traces.
PROFILING = "_is_profiler_enabled"
PROFILER: dict[str, Any] = vars(torch.autograd.profiler)
if PROFILING not in PROFILER:
    PROFILER = {PROFILING: False}


# ---- tensors without memory ------------------------------------------------------------------
from torch._subclasses.fake_tensor import FakeTensor

# ---- process groups --------------------------------------------------------------------------
# The group's own calls, by name, and their options: what torch.distributed's functions do in Python would
# take as long as a small call. Private until torch 2.13. Without them: those functions.
AllgatherOptions = torch._C._distributed_c10d.AllgatherOptions
ReduceScatterOptions = torch._C._distributed_c10d.ReduceScatterOptions
_PUBLIC = hasattr(torch.distributed.ProcessGroup, "all_gather_single")
GATHER = "all_gather_single" if _PUBLIC else "_allgather_base"
REDUCE_SCATTER = "reduce_scatter_single" if _PUBLIC else "_reduce_scatter_base"


def backend_for(process_group: Any, device: torch.device) -> Any:
    """The backend that carries tensors of this device; RuntimeError where there is none."""
    return process_group._get_backend(device)


def backend_device_types(process_group: Any) -> Sequence[torch.device]:
    """The device types that the group's backends carry."""
    types: Sequence[torch.device] = process_group._device_types
    return types


def backend_timeout(process_group: Any) -> timedelta:
    """How long the group's backend waits for a call. Without it: a deadline could not be undone."""
    backend = backend_for(process_group, backend_device_types(process_group)[0])
    found: timedelta = backend.options._timeout
    return found


def sequence_number(process_group: Any) -> int:
    """Count the calls made on a group, for the pool of test ranks."""
    return int(process_group._get_sequence_number_for_group())


def functional_collectives() -> Any:
    """Torch's functional collectives, which ``allgrad bench`` measures beside ours."""
    from torch.distributed import _functional_collectives

    return _functional_collectives


# ---- compiled graphs -------------------------------------------------------------------------


# Before torch 2.13 TorchDynamo does not look through the wrappers of torch.func for such lengths.
FINDS_LENGTHS_IN_TRANSFORMS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def process_group_named(name: str) -> Any:
    """The process group of this name: graphs know groups by their names."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def traced_frames() -> list[Any]:
    """The frames of the program that TorchDynamo traces, the innermost last.

    Without it: in checked mode the line of a compiled call is that of the call of its graph.
    """
    context = torch._guards.TracingContext
    return list(context.extract_stack()) if context.try_get() is not None else []


def lengths_differ(a: int, b: int) -> bool:
    """Tell whether two lengths differ; in a graph, lengths found when it runs are compared then."""
    if not torch.compiler.is_compiling():
        return a != b
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    if guard_or_false(a != b):
        return True
    torch._check(a == b)
    return False
