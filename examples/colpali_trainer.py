"""colpali-engine: ContrastiveTrainer over the documents of all ranks, with unequal batches.

    torchrun --standalone --nproc-per-node 2 examples/colpali_trainer.py

Two ranks train in DDP; one process trains on the joined batch. The parameters are equal.
"""

import tempfile

import torch
from colpali_engine.loss import BiEncoderLoss
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import TrainingArguments

from allgrad.integrations.colpali import ContrastiveTrainer

GENERATOR = torch.Generator().manual_seed(1)
QUERIES, DOCUMENTS = torch.randn(2, 7, 8, dtype=torch.float64, generator=GENERATOR)


class Encoder(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Encoder(8, 4).double()


def main() -> None:
    options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "optim": "sgd"}
    options |= {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "learning_rate": 0.01}
    # Batches of 4: rank 0 has the first 4 rows, rank 1 the last 3.
    options |= {"per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"}
    options |= {"num_train_epochs": 3, "accelerator_config": {"even_batches": False}}
    rows = tuple({"query_x": q, "doc_x": d} for q, d in zip(QUERIES, DOCUMENTS, strict=True))
    given = {"train_dataset": rows, "eval_dataset": None, "data_collator": default_collate}
    loss, model = BiEncoderLoss(temperature=0.5), make_model()
    with tempfile.TemporaryDirectory() as folder:
        given["args"] = TrainingArguments(folder, remove_unused_columns=False, **options)
        trainer = ContrastiveTrainer(loss, is_vision_model=False, model=model, **given)
        trainer.train()

    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss(alone(QUERIES), alone(DOCUMENTS)).backward()
        optimizer.step()
    for ours, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-10)
    print(f"rank {trainer.args.process_index}: the parameters are those of one process")


if __name__ == "__main__":
    main()
