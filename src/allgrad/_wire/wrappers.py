"""The wrappers of torch that synchronise gradients: how to recognise them, and how to make them sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from allgrad._core.module_internals import fsdp_group_sizes

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "DistributedDataParallel",
    "fsdp_modules",
    "fully_sharded",
    "is_ddp",
    "ranks_of_ddp",
    "ranks_of_fsdp",
    "sum_in_ddp",
    "sum_in_fsdp",
]


def is_ddp(model: object) -> bool:
    """Tell whether this is a DDP module."""
    return isinstance(model, DistributedDataParallel)


def ranks_of_ddp(model: Any) -> int:
    """Count the ranks that a DDP module synchronises."""
    return int(model.process_group.size())


def sum_in_ddp(model: Any) -> None:
    """Sum the buckets of a DDP module over its group, without a division."""
    model.register_comm_hook(model.process_group, _sum_bucket)


def _sum_bucket(state, bucket):  # type: ignore[no-untyped-def] # DDP refuses annotations as strings
    work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def fully_sharded(model: nn.Module, device_type: str) -> nn.Module:
    """Shard the parameters of ``model`` over the world, in place (FSDP2)."""
    from torch.distributed.fsdp import fully_shard  # a second of imports

    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return model


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The FSDP2 modules inside ``model``, itself included."""
    # By name: importing the class takes a second, and whoever has such a module has imported it.
    return [
        module
        for module in model.modules()
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
    ]


def ranks_of_fsdp(model: nn.Module) -> int:
    """Count the ranks over which FSDP2 takes the mean.

    Not by the meshes of parameters: between forward and backward these may be plain tensors, and with tensor
    parallelism the mesh has more ranks (test_fsdp2_between_forward_and_backward, test_fsdp2_beside_tensor_parallel).
    """
    sizes = [size for module in fsdp_modules(model) for size in fsdp_group_sizes(module)]
    return sizes[0] if sizes else 1


def sum_in_fsdp(model: nn.Module) -> None:
    """Let every FSDP2 module sum, without a division."""
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        # Otherwise the factor is multiplied inside the collective, which aborts on Gloo.
        module.set_force_sum_reduction_for_comms(True)
