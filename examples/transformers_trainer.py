"""The Trainer of transformers: its accelerator gathers unequal batches, with their gradients.

    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py

Two ranks train in DDP; one process trains on the joined batch. The parameters are equal.
"""

from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from allgrad.integrations.accelerate import exact_gather

X = torch.randn(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Head(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Contrastive(Trainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **_: object) -> Tensor:
        return info_nce(self.accelerator.gather(model(**inputs)))


def info_nce(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=1)
    return nn.functional.cross_entropy(left @ right.T, torch.arange(len(x)))


def main() -> None:
    options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "max_grad_norm": 0.0}
    options |= {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.1}
    options |= {"per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"}
    options |= {"num_train_epochs": 3, "accelerator_config": {"even_batches": False}}
    data, model = [{"x": row} for row in X], Head()  # 4 rows on rank 0, 3 on rank 1
    with TemporaryDirectory() as folder:
        trainer = Contrastive(model, TrainingArguments(folder, **options), train_dataset=data)
        with exact_gather(trainer.accelerator):
            trainer.train()

    alone = Head()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        info_nce(alone(X)).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, alone.weight, rtol=1e-10, atol=1e-10)
    print(f"rank {trainer.args.process_index}: the parameters are those of one process")


if __name__ == "__main__":
    main()
