"""open_clip: its tiny CLIP and our create_loss, with unequal batches.

    torchrun --standalone --nproc-per-node 2 examples/open_clip_loss.py

Two ranks train in DDP; one process trains on the joined batch. The parameters are equal.
"""

from types import SimpleNamespace

import open_clip
import torch
import torch.distributed as dist
from torch import Tensor, nn

from allgrad.integrations.open_clip import create_loss

ROWS = (3, 1)  # pairs by rank
VISION = {"image_size": 8, "layers": 1, "width": 16, "head_width": 8, "patch_size": 4}
TEXT = {"context_length": 6, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1}
# The options of open_clip's training script that choose a loss.
ARGS = SimpleNamespace(model="tiny", distill=False, siglip=False)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return open_clip.CLIP(embed_dim=8, vision_cfg=VISION, text_cfg=TEXT).double()


def train(model: nn.Module, loss: nn.Module, images: Tensor, texts: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        image, text, scale = model(images, texts)
        loss(image, text, scale).backward()
        optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(sum(ROWS), 3, 8, 8, dtype=torch.float64, generator=generator)
    texts = torch.randint(1, 20, (sum(ROWS), 6), generator=generator)
    rank = dist.get_rank()

    model = make_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    train(wrapped, create_loss(ARGS), images.split(ROWS)[rank], texts.split(ROWS)[rank])

    alone = make_model()
    train(alone, open_clip.ClipLoss(), images, texts)
    for ours, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-9, atol=1e-9)
    print(f"rank {rank}: the parameters are those of one process")
    del wrapped  # first: freed after its group, DDP may wait for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
