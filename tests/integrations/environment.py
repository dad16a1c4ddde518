"""The environment that torchrun gives a rank, for libraries that read it."""

import os
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def torchrun_environment():
    """Variables of this rank, taken back after the block."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def accelerator(make=None):
    """An Accelerator in the process group that this rank already has."""
    import accelerate
    from accelerate.state import AcceleratorState

    with torchrun_environment():
        try:
            yield (make or accelerate.Accelerator)(cpu=True)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
