"""Private names of torch that layers and wrappers need, each with its purpose and what happens without it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "active_ddp_module",
    "forwards_of",
    "fsdp1_ranks",
    "fsdp_group_sizes",
    "kernel_inputs",
    "own_buffers",
    "sync_ddp_buffers",
]


def kernel_inputs(node: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The queries, keys and values that torch's attention kernel saved, with their graph."""
    return node._saved_query, node._saved_key, node._saved_value


def forwards_of(layer: type[torch.nn.Module]) -> tuple[object, object]:
    """What a layer computes its output with: of a convolution also the method that its forward calls.

    Without it: a convolution that has another such method is taken for a plain one.
    """
    return layer.forward, getattr(layer, "_conv_forward", None)


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's buffers by name, also those that are None. Without it: named_buffers, which leaves them out."""
    return dict(module._buffers.items())


def active_ddp_module() -> Any:
    """The DDP module inside whose forward this is, or None. Without it: None."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def sync_ddp_buffers(module: Any) -> None:
    """Give a DDP module rank 0's buffers now, if its next forward would. Without it: that forward does."""
    if getattr(module, "_check_sync_bufs_pre_fwd", bool)():
        module._sync_buffers()
        module.require_forward_param_sync = False


def fsdp_group_sizes(module: Any) -> list[int]:
    """The ranks over which an FSDP2 module takes the mean, for each of its groups of parameters.

    Without it: the factor of the gradients cannot be told.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [int(group.mesh_info.mesh.size()) for group in groups if group is not None]


def fsdp1_ranks(module: Any) -> int:
    """The ranks over which an FSDP1 module takes the mean. Without it: those of one replica."""
    between = getattr(
        module, "_inter_node_pg", None
    )  # of a hybrid one, whose shards are replicated
    return int(module.world_size) * (1 if between is None else int(between.size()))
