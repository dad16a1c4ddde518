"""sentence-transformers: MultipleNegativesRankingLoss over all ranks, with unequal batches.

    torchrun --standalone --nproc-per-node 2 examples/sentence_transformers_loss.py

Two ranks train in DDP; one process trains on the joined batch. The parameters are equal.
SentenceTransformerTrainer takes such a loss as it is: loss=GatheredLoss(...).
"""

import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from allgrad.integrations.sentence_transformers import GatheredLoss

ROWS = (3, 1)  # pairs by rank
QUESTIONS = ["how warm", "what colour", "who sings", "how far"]
ANSWERS = ["20 degrees", "blue", "the choir", "two miles"]


def make_model() -> SentenceTransformer:
    torch.manual_seed(0)
    words = sorted({word for text in QUESTIONS + ANSWERS for word in text.split()})
    ids = {word: i for i, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    embedding = StaticEmbedding(tokenizer, embedding_dim=8)
    return SentenceTransformer(modules=[embedding], device="cpu").double()


def train(model: nn.Module, loss: nn.Module, columns: list[dict[str, torch.Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss([dict(column) for column in columns], None).backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    rank, model, alone = dist.get_rank(), make_model(), make_model()
    mine = slice(sum(ROWS[:rank]), sum(ROWS[: rank + 1]))

    wrapped = nn.parallel.DistributedDataParallel(model)
    loss = MultipleNegativesRankingLoss(wrapped, gather_across_devices=True)
    train(wrapped, GatheredLoss(loss), [model.preprocess(t[mine]) for t in (QUESTIONS, ANSWERS)])
    loss = MultipleNegativesRankingLoss(alone)
    train(alone, loss, [alone.preprocess(texts) for texts in (QUESTIONS, ANSWERS)])
    for ours, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-10, atol=1e-10)
    print(f"rank {rank}: the parameters are those of one process")
    del wrapped  # first: freed after its group, DDP may wait for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
