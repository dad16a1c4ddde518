"""Lightning Fabric: all_gather of unequal batches, with its gradient.

    torchrun --standalone --nproc-per-node 2 examples/lightning_gather.py

Two ranks train in DDP; one process trains on the joined batch. The parameters are equal.
"""

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from allgrad.integrations.lightning import FabricDDPStrategy

ROWS = (5, 2)  # rows by rank


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def info_nce(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=1)
    return nn.functional.cross_entropy(left @ right.T, torch.arange(len(x)))


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricDDPStrategy())
    fabric.launch()
    x = torch.randn(sum(ROWS), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = x.split(ROWS)[fabric.global_rank]

    net = make_model()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(5):
        optimizer.zero_grad()
        everyone = fabric.all_gather(model(mine), sync_grads=True)  # (7, 4) on both ranks
        fabric.backward(info_nce(everyone))
        optimizer.step()

    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        info_nce(alone(x)).backward()
        optimizer.step()
    for ours, its in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-10)
    print(f"rank {fabric.global_rank}: the parameters are those of one process")


if __name__ == "__main__":
    main()
