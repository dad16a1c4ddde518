"""Train with checkpoints; ranks that are started again go on from the last one.

    torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 2 --rdzv-backend c10d --rdzv-endpoint HOST0:29400
        examples/restart.py CHECKPOINT 1000       (in one line, on every host; see docs/many_hosts.md)

When ranks are killed, the others raise ``RankLost`` and end, and torchrun starts all of them again.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import allgrad as ag


def gradient(x, y, w, rows):
    """The gradient of the mean over the rows of all ranks."""
    w = w.detach().requires_grad_()
    (found,) = torch.autograd.grad(((x @ ag.share(w)).tanh() - y).square().sum() / rows, w)
    return found


def save(path, step, w):
    torch.save((step, w), f"{path}.new")
    Path(f"{path}.new").replace(path)  # a checkpoint is whole, or it is not there


def load(path, w):
    """What rank 0 saved last, on every rank."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    step, w = torch.load(path) if path and first and Path(path).exists() else (0, w)
    return int(ag.broadcast(torch.tensor(step))), ag.broadcast(w).detach()


def main(path="", steps=20):
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    make = torch.Generator().manual_seed(0)
    shapes = (12, 4), (12, 2), (4, 2)
    x, y, w = (torch.randn(shape, dtype=torch.float64, generator=make) for shape in shapes)
    alone = w.clone()
    with ag.deadline(60):
        begin, w = load(path, w)
        print(f"rank {rank} begins with step {begin}", flush=True)
        for step in range(begin, steps):
            w = w - 0.01 * gradient(x[rank::world], y[rank::world], w, rows=12)
            if path and rank == 0 and step % 10 == 9:
                save(path, step + 1, w)
    for _ in range(steps):  # the same in one process, with all rows
        alone = alone - 0.01 * (x.T @ ((z := (x @ alone).tanh()) - y).mul(1 - z * z)) / 6
    assert (w - alone).abs().max().item() < 1e-12
    print(f"rank {rank}: the parameters are those of one process", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
