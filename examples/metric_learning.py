"""pytorch-metric-learning: triplets mined in the embeddings of all ranks, with unequal batches.

    torchrun --standalone --nproc-per-node 2 examples/metric_learning.py

Two ranks train in DDP; one process trains on the joined batch. The parameters are equal.
"""

import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from torch import Tensor, nn

from allgrad.integrations.pytorch_metric_learning import (
    DistributedLossWrapper,
    DistributedMinerWrapper,
)

ROWS = (6, 3)  # rows by rank


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def train(model: nn.Module, loss: nn.Module, miner: nn.Module, x: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        embeddings = model(x)
        loss(embeddings, labels, miner(embeddings, labels)).backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    x = torch.randn(sum(ROWS), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels, rank = torch.arange(len(x)) % 3, dist.get_rank()
    loss, miner = TripletMarginLoss(margin=1.0), BatchHardMiner()

    model = make_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    ours = DistributedLossWrapper(loss), DistributedMinerWrapper(miner)
    train(wrapped, *ours, x.split(ROWS)[rank], labels.split(ROWS)[rank])

    alone = make_model()
    train(alone, loss, miner, x, labels)
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-10)
    print(f"rank {rank}: the parameters are those of one process")
    del wrapped  # first: freed after its group, DDP may wait for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
