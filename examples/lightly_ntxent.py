"""lightly's NTXentLoss over the images of all ranks, with unequal batches.

    torchrun --standalone --nproc-per-node 2 examples/lightly_ntxent.py

Two ranks train a tiny projection head in DDP; one process trains it on the joined batch. The
parameters are equal.
"""

import torch
import torch.distributed as dist
from lightly.loss import NTXentLoss
from torch import nn

from allgrad.integrations import JoinedLoss

ROWS = (5, 2)  # images by rank


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def train(model: nn.Module, loss: nn.Module, views: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        left, right = model(views.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        loss(left, right).backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    views = torch.randn(
        sum(ROWS), 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    model = make_model()
    mine = views.split(ROWS)[dist.get_rank()]
    train(nn.parallel.DistributedDataParallel(model), JoinedLoss(NTXentLoss()), mine)

    alone = make_model()
    train(alone, NTXentLoss(), views)
    for ours, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-10)
    print(f"rank {dist.get_rank()}: the parameters are those of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
