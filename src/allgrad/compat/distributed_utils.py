"""The helpers of ``torch.distributed.utils``, under their names and signatures.

Each is a few lines over :mod:`allgrad.module_state`, :mod:`allgrad.containers.nests` and
:mod:`allgrad.containers.call_arguments`. Where the original is silently wrong, the docstring here
tells what happens instead; errors are allgrad's, with a table of what every rank had.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from allgrad.containers.call_arguments import cast_call, pack_call, unpack_call
from allgrad.containers.nests import map_tensors
from allgrad.module_state import (
    free_storage,
    is_allocated,
    rename_prefix,
    restore_storage,
    sync,
    verify,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from allgrad._wire.primitives import GroupLike

__all__: list[str] = []  # every name is private, as in the original

_MIB = 2**20


def _pack_kwargs(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """All values, keyword arguments last, and the keys."""
    keys, flat = pack_call(args, kwargs)
    return flat, keys


def _unpack_kwargs(
    flat_args: tuple[Any, ...], kwarg_keys: tuple[str, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Undo ``_pack_kwargs``. A key given twice raises: no call has one."""
    return unpack_call(kwarg_keys, flat_args)


def _cast_forward_inputs(
    dtype: torch.dtype | None, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with floating-point tensors in ``dtype``; a tensor given twice is cast once.

    An integer or bool ``dtype`` raises, where the original casts: it would truncate values and has no gradient.
    """
    return cast_call(args, kwargs, dtype)


def _recursive_to(
    inputs: Any,
    target_device: torch.device,
    use_side_stream_for_tensor_copies: bool,  # noqa: ARG001
) -> list[Any] | tuple[Any]:
    """The inputs on the device, as the only element of a list (of a tuple, for a single tensor).

    Copies run on the current stream, whatever the last argument; the values are the same.
    Dicts of any type, dataclasses and nested containers are moved too.
    """
    moved = map_tensors(lambda tensor: tensor.to(target_device), inputs)
    return (moved,) if isinstance(inputs, (Tensor, PackedSequence)) else [moved]


def _to_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_device: torch.device,
    use_side_stream_for_tensor_copies: bool,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Both on the device, each in a tuple of length 1; empty tuples if there is nothing to move."""
    if not inputs and not kwargs:
        return (), ()
    side_stream = use_side_stream_for_tensor_copies
    moved_inputs = _recursive_to(inputs, target_device, side_stream) if inputs else [()]
    moved_kwargs = _recursive_to(kwargs, target_device, side_stream) if kwargs else [{}]
    return tuple(moved_inputs), tuple(moved_kwargs)


def _apply_to_tensors(fn: Callable[[Tensor], Any], container: Any) -> Any:
    """The container with ``fn(tensor)`` for each tensor.

    The original drops the result for a ``PackedSequence``, turns every dict into a plain ``dict`` and
    runs ``fn`` twice on a tensor held twice; here results and types are kept, and ``fn`` runs once.
    """
    return map_tensors(fn, container)


def _p_assert(cond: Any, s: str, raise_assertion_error: bool = True) -> None:
    """An assertion that also prints its message and stack, where exceptions may be lost."""
    if not cond:
        print(s)  # noqa: T201
        traceback.print_stack()
        if raise_assertion_error:
            raise AssertionError(s)


def _alloc_storage(tensor: Tensor, size: torch.Size) -> bool:
    """Allocate memory for ``size`` again; tell whether there was none.

    The original accepts a size too small for the shape of the tensor, which is then read past its
    end; here that raises.
    """
    return restore_storage(tensor, size)


def _free_storage(tensor: Tensor) -> bool:
    """Free the memory of the tensor; tell whether there was any.

    The original frees memory that other tensors still use, if the tensor is at its beginning; here
    that raises.
    """
    return free_storage(tensor)


def _data_ptr_allocated(tensor: Tensor) -> bool:
    """Tell whether the tensor has memory."""
    return is_allocated(tensor)


def _verify_param_shape_across_processes(
    process_group: GroupLike,
    tensors: Sequence[Tensor],
    logger: object = None,  # noqa: ARG001
) -> None:
    """Raise ``StateMismatch``, a ``RuntimeError``, unless all ranks have these shapes and strides.

    Every rank raises, rank 0 too, with a table of what each had; dtypes are compared too.
    """
    specs: dict[str, Any] = {}
    for number, tensor in enumerate(tensors):
        specs[f"params[{number}]"] = torch.empty_like(tensor, device="meta")
        specs[f"params[{number}].stride()"] = str(tuple(tensor.stride()))
    verify(specs, group=process_group)


def _sync_module_states(  # noqa: PLR0917
    module: nn.Module,
    process_group: GroupLike,
    broadcast_bucket_size: int,
    src: int,
    params_and_buffers_to_ignore: Container[str],
    broadcast_buffers: bool = True,
) -> None:
    """Give every rank the parameters and buffers of ``src``; see :func:`allgrad.module_state.sync`.

    The original assumes that all ranks hold the same shapes, and writes garbage or aborts if they
    do not; here every rank raises before any value is sent.
    """
    state: dict[str, Tensor] = dict(module.named_parameters())
    if broadcast_buffers:
        state |= dict(module.named_buffers())
    kept = {name: x for name, x in state.items() if name not in params_and_buffers_to_ignore}
    sync(kept, src, group=process_group, bucket_mb=broadcast_bucket_size / _MIB)


def _sync_params_and_buffers(
    process_group: GroupLike,
    module_states: Sequence[Tensor],
    broadcast_bucket_size: int,
    src: int,
) -> None:
    """Give every rank the tensors of ``src``, in place, checked as in ``_sync_module_states``."""
    state = {f"module_states[{number}]": x for number, x in enumerate(module_states)}
    sync(state, src, group=process_group, bucket_mb=broadcast_bucket_size / _MIB)


def _replace_by_prefix(state_dict: dict[str, Any], old_prefix: str, new_prefix: str) -> None:
    """Replace a prefix in the keys, in place.

    The original overwrites an entry that already has the new name, moves renamed keys to the end
    and does not rename ``_metadata``; here a clash raises, the order stays, versions are renamed.
    """
    rename_prefix(state_dict, old_prefix, new_prefix)


def _get_root_modules(modules: list[nn.Module]) -> list[nn.Module]:
    """The modules that are not inside another module of the list."""
    inner = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if module not in inner]
