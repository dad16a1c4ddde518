"""pylate: Contrastive over the documents of all ranks, with unequal batches.

    torchrun --standalone --nproc-per-node 2 examples/pylate_contrastive.py

Two ranks train in DDP; one process trains on the joined batch. The parameters are equal.
"""

import torch
import torch.distributed as dist
from pylate.losses import Contrastive
from torch import Tensor, nn

from allgrad.integrations.pylate import GatheredLoss

ROWS = (3, 1)  # queries by rank
IDS = torch.randint(1, 20, (2, sum(ROWS), 5), generator=torch.Generator().manual_seed(1))


class TinyColBERT(nn.Module):
    """One vector a token, as ColBERT gives them; token 0 does not count in documents."""

    skiplist = (0,)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 6).double()

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"token_embeddings": self.embedding(features["input_ids"])}


def train(model: nn.Module, loss: nn.Module, queries: Tensor, documents: Tensor) -> None:
    columns = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in (queries, documents)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss(columns).backward()
        optimizer.step()


def main() -> None:
    model, alone = TinyColBERT(), TinyColBERT()
    train(alone, Contrastive(alone), *IDS)

    dist.init_process_group("gloo")
    rank, wrapped = dist.get_rank(), nn.parallel.DistributedDataParallel(model)
    loss = GatheredLoss(Contrastive(wrapped, gather_across_devices=True))
    train(wrapped, loss, *(x.split(ROWS)[rank] for x in IDS))
    for ours, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-10)
    print(f"rank {rank}: the parameters are those of one process")
    del wrapped, loss  # first: freed after its group, DDP may wait for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
