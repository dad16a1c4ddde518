"""Train on unequal batches, and get what one process gets.

Each rank holds another number of rows. The layer uses statistics of the whole batch, and the
loss is the mean over all rows of all ranks.

    torchrun --nproc-per-node 3 examples/unequal_batches.py
    python examples/unequal_batches.py            # a world of one
"""

import os

import torch
import torch.distributed as dist

import allgrad as ag


def train(x, y, w, rows, steps=20):
    """Gradient descent on this rank's rows, maybe none of them; ``rows`` counts those of all ranks."""
    for _ in range(steps):
        w = w.detach().requires_grad_()
        with ag.lockstep() as step:  # the same backward everywhere, also on a rank without rows
            h = (x @ ag.share(w)).tanh()
            mean = ag.all_reduce(h.sum(0)) / rows  # of the whole batch
            loss = (h - mean - y).square().sum() / rows
        step.backward(loss)
        w = w - 0.1 * w.grad  # share has summed it: every rank has the gradient of all losses
    return w.detach()


def main():
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    make = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, dtype=torch.float64, generator=make)
    y = torch.randn(12, 2, dtype=torch.float64, generator=make)
    w = torch.randn(4, 2, dtype=torch.float64, generator=make)

    sizes = [12 * r // (world * (world - 1) // 2 or 1) for r in range(world)]  # rank 0 has none
    sizes[-1] = 12 - sum(sizes[:-1])
    ours = train(x.split(sizes)[rank], y.split(sizes)[rank], w, rows=12)

    alone = w.clone()  # the same in one process, with all rows
    for _ in range(20):
        alone.requires_grad_()
        h = (x @ alone).tanh()
        (gradient,) = torch.autograd.grad((h - h.mean(0) - y).square().sum() / 12, alone)
        alone = (alone - 0.1 * gradient).detach()
    difference = (ours - alone).abs().max().item()
    assert difference < 1e-12
    print(f"rank {rank} with {sizes[rank]} of 12 rows: the parameters are those of one process")


if __name__ == "__main__":
    main()
