"""torchmetrics: a metric of all ranks' rows as a loss, with unequal batches.

    torchrun --standalone --nproc-per-node 2 examples/torchmetrics_loss.py

Two ranks train in DDP; one process trains on the joined batch. The parameters are equal.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics.regression import CosineSimilarity

from allgrad.integrations.torchmetrics import gather_all_tensors

ROWS = (5, 2)  # rows by rank


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def train(model: nn.Module, x: Tensor, target: Tensor, **options: object) -> None:
    metric = CosineSimilarity(reduction="mean", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (-metric(model(x), target)).backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(1)
    x = torch.randn(sum(ROWS), 8, dtype=torch.float64, generator=generator)
    target = torch.randn(sum(ROWS), 4, dtype=torch.float64, generator=generator)

    model = make_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    synced = {"dist_sync_on_step": True, "dist_sync_fn": gather_all_tensors}
    train(wrapped, x.split(ROWS)[rank], target.split(ROWS)[rank], **synced)

    alone = make_model()
    train(alone, x, target)
    for ours, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-10)
    print(f"rank {rank}: the parameters are those of one process")
    del wrapped  # first: freed after its group, DDP may wait for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
