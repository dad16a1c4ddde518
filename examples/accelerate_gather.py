"""Accelerate: gather of unequal batches, with its gradient.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_gather.py

Two ranks train in DDP; one process trains on the joined batch. The parameters are equal.
"""

import torch
from torch import Tensor, nn

from allgrad.integrations.accelerate import Accelerator

ROWS = (5, 2)  # rows by rank


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def info_nce(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=1)
    return nn.functional.cross_entropy(left @ right.T, torch.arange(len(x)))


def main() -> None:
    accelerator = Accelerator(cpu=True)
    x = torch.randn(sum(ROWS), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = x.split(ROWS)[accelerator.process_index]

    net = make_model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(5):
        optimizer.zero_grad()
        everyone = accelerator.gather(model(mine))  # (7, 4) on both ranks
        accelerator.backward(info_nce(everyone))
        optimizer.step()

    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        info_nce(alone(x)).backward()
        optimizer.step()
    for ours, its in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-10)
    print(f"rank {accelerator.process_index}: the parameters are those of one process")
    accelerator.end_training()


if __name__ == "__main__":
    main()
