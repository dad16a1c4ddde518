"""Lightning Trainer: self.all_gather of unequal batches, with its gradient.

    torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py

Two ranks train in DDP; one process trains on the joined batch. The parameters are equal.
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from allgrad.integrations.lightning import TrainerDDPStrategy

ROWS = (5, 2)  # rows by rank
X = torch.randn(sum(ROWS), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Contrastive(lightning.LightningModule):
    """A head that is trained by InfoNCE over the rows of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()

    def training_step(self, x: Tensor) -> Tensor:
        return info_nce(self.all_gather(self.net(x), sync_grads=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader([X.split(ROWS)[self.global_rank]] * 5, batch_size=None)


def info_nce(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=1)
    return nn.functional.cross_entropy(left @ right.T, torch.arange(len(x)))


def main() -> None:
    model = Contrastive()
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False}
    options |= {"enable_checkpointing": False, "use_distributed_sampler": False}
    lightning.Trainer(strategy=TrainerDDPStrategy(), **options).fit(model)

    alone = Contrastive()
    optimizer = alone.configure_optimizers()
    for _ in range(5):
        optimizer.zero_grad()
        info_nce(alone.net(X)).backward()
        optimizer.step()
    for ours, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-10)
    print(f"rank {model.global_rank}: the parameters are those of one process")


if __name__ == "__main__":
    main()
