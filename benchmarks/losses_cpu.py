"""Losses beside dense ones by hand on ``ag.all_gather``: CPU ranks, in turns, forward and backward.

    python benchmarks/losses_cpu.py [--loss clip siglip info_nce] [--dtype float32 bfloat16]
                                    [--batch 8x64 ... 8192x256] [--ranks 4] [--sizes equal found]
                                    [--seconds 3] [--without whole] [--errors]

A batch is the pairs of all ranks and the width of their features. By hand, each rank gathers both
sides and computes either the whole matrix of scores, or the rows of its own samples in both
directions, as open_clip's ``local_loss`` does. "rows" has the loss of all ranks on each of them, as
allgrad and "whole" have, by one more message; "local" are the same rows without it, so that each rank
has another loss. These multiply in float32 after the gather, as exact as allgrad; "16 bits" are rows
with products in the features' dtype, as under autocast (left out for float32). A figure is the median
of the slowest rank's times. ``--errors`` shows those of the gradients of both features instead,
against float64.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, logsigmoid, normalize

import allgrad as ag
from allgrad.losses import clip_loss, info_nce_loss, reference, siglip_loss
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BATCHES = ["8x64", "64x128", "512x256", "1024x512", "2048x256", "8192x256"]
SCALE, BIAS = 20.0, -5.0


EXACT = [True]


def scores_of(scale: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    if EXACT[0]:
        rows, columns = rows.float(), columns.float()
    return (scale.to(rows.dtype) * rows @ columns.T).float()


def clip_whole(image: Tensor, text: Tensor, scale: Tensor, sizes: str | None) -> Tensor:
    scores = scores_of(scale, ag.all_gather(image, sizes=sizes), ag.all_gather(text, sizes=sizes))
    target = torch.arange(len(scores))
    return (cross_entropy(scores, target) + cross_entropy(scores.T, target)) / 2


def clip_rows(image: Tensor, text: Tensor, scale: Tensor, sizes: str | None) -> Tensor:
    images, texts = ag.all_gather(image, sizes=sizes), ag.all_gather(text, sizes=sizes)
    target = torch.arange(len(image)) + dist.get_rank() * len(image)
    by_image = cross_entropy(scores_of(scale, image, texts), target)
    return (by_image + cross_entropy(scores_of(scale, text, images), target)) / 2


def siglip_whole(image: Tensor, text: Tensor, scale: Tensor, sizes: str | None) -> Tensor:
    images, texts = ag.all_gather(image, sizes=sizes), ag.all_gather(text, sizes=sizes)
    scores = scores_of(scale, images, texts) + BIAS
    sign = 2 * torch.eye(len(images)) - 1
    return -logsigmoid(sign * scores).sum() / len(images)


def siglip_rows(image: Tensor, text: Tensor, scale: Tensor, sizes: str | None) -> Tensor:
    scores = scores_of(scale, image, ag.all_gather(text, sizes=sizes)) + BIAS
    sign = torch.full_like(scores, -1.0)
    sign.diagonal(dist.get_rank() * len(image)).fill_(1.0)
    return -logsigmoid(sign * scores).sum() / len(image)


def info_nce_whole(query: Tensor, key: Tensor, scale: Tensor, sizes: str | None) -> Tensor:
    scores = scores_of(scale, ag.all_gather(query, sizes=sizes), ag.all_gather(key, sizes=sizes))
    return cross_entropy(scores, torch.arange(len(scores)))


def info_nce_rows(query: Tensor, key: Tensor, scale: Tensor, sizes: str | None) -> Tensor:
    target = torch.arange(len(query)) + dist.get_rank() * len(query)
    return cross_entropy(scores_of(scale, query, ag.all_gather(key, sizes=sizes)), target)


def siglip(image: Tensor, text: Tensor, scale: Tensor, sizes: str | None) -> Tensor:
    return siglip_loss(image, text, scale, BIAS, sizes=sizes)


def with_value(local: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss of all ranks, with the gradient of each rank's own."""

    def loss(*args: Any) -> Tensor:
        own = local(*args)
        return own + ag.all_reduce(own.detach(), "mean", grad="none") - own.detach()

    return loss


def in_16_bits(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def narrow(*args: Any) -> Tensor:
        EXACT[0] = False
        try:
            return loss(*args)
        finally:
            EXACT[0] = True

    return narrow


LOSSES: dict[str, dict[str, Callable[..., Tensor]]] = {
    "clip": {
        "allgrad": lambda i, t, s, sizes: clip_loss(i, t, s, sizes=sizes),
        "whole": clip_whole,
        "rows": with_value(clip_rows),
        "local": clip_rows,
    },
    "siglip": {
        "allgrad": siglip,
        "whole": siglip_whole,
        "rows": with_value(siglip_rows),
        "local": siglip_rows,
    },
    "info_nce": {
        "allgrad": lambda q, k, s, sizes: info_nce_loss(q, k, s, sizes=sizes),
        "whole": info_nce_whole,
        "rows": with_value(info_nce_rows),
        "local": info_nce_rows,
    },
}
for each in LOSSES.values():
    each["16 bits"] = in_16_bits(each["rows"])
FORMULAS = {"clip": reference.clip, "siglip": reference.siglip, "info_nce": reference.info_nce}


def errors_on_rank(loss: str, pairs: int, width: int, kind: str, without: list[str]) -> list[str]:
    """The errors of the gradients by this rank's features, relative to float64."""
    torch.manual_seed(0)
    image = normalize(torch.randn(pairs, width), dim=1)
    text = normalize(image + normalize(torch.randn(pairs, width), dim=1), dim=1)
    whole = [x.to(getattr(torch, kind)) for x in (image, text)]
    exact = [x.double().requires_grad_() for x in whole]
    numbers = [SCALE, *([BIAS] if loss == "siglip" else [])]
    FORMULAS[loss](*exact, *(torch.tensor(x).double() for x in numbers)).backward()
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for name, way in LOSSES[loss].items():
        if name not in without:
            own = [x.chunk(world)[rank].clone().requires_grad_() for x in whole]
            way(*own, torch.tensor(SCALE), "equal").backward()
            wanted = [world * x.grad.chunk(world)[rank] for x in exact]
            off = [(x.grad - y).norm() / y.norm() for x, y in zip(own, wanted, strict=True)]
            found.append(f"{max(off):.1e}")
    return found


def on_rank(  # noqa: PLR0917
    loss: str,
    pairs: int,
    width: int,
    kind: str,
    sizes: str | None,
    seconds: float,
    without: list[str],
) -> dict[str, list[float]]:
    """The milliseconds of each step, by implementation."""
    dtype, world = getattr(torch, kind), dist.get_world_size()
    features = [
        normalize(torch.randn(pairs // world, width), dim=1).to(dtype).requires_grad_()
        for _ in range(2)
    ]
    scale = torch.tensor(SCALE, requires_grad=True)
    ways = {name: way for name, way in LOSSES[loss].items() if name not in without}
    order = random.Random(0)  # noqa: S311  the same on every rank
    taken: dict[str, list[float]] = {name: [] for name in ways}

    def step(name: str) -> None:
        for x in (*features, scale):
            x.grad = None
        dist.barrier()
        start = time.perf_counter()
        ways[name](*features, scale, sizes).backward()
        taken[name].append((time.perf_counter() - start) * 1e3)

    for name in [*ways, *ways]:
        step(name)
    total = torch.tensor(sum(each[-1] for each in taken.values()))
    slowest = ag.all_reduce(total, "max", grad="none")
    for each in taken.values():
        each.clear()
    for _ in range(max(3, min(300, int(seconds * 1e3 / float(slowest))))):
        for name in order.sample(list(ways), len(ways)):
            step(name)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch", nargs="+", default=BATCHES)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", nargs="+", choices=["equal", "found"], default=["equal"])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--without", nargs="+", default=[], help="implementations to leave out")
    parser.add_argument("--errors", action="store_true")
    args = parser.parse_args()
    print(
        f"{args.ranks} ranks, torch {torch.__version__}, ms; last: allgrad relative to "
        "the faster of whole and rows, to local, to 16 bits"
    )
    for loss in args.loss:
        for kind in args.dtype:
            without = [*args.without, *(["16 bits"] if kind == "float32" else [])]
            for sizes in args.sizes:
                names = "".join(f"{name:>10}" for name in LOSSES[loss] if name not in without)
                print(f"{loss + ', ' + kind + ', sizes ' + sizes:<34}{names}")
                for batch in args.batch:
                    pairs, width = map(int, batch.split("x"))
                    if args.errors:
                        job = errors_on_rank, args.ranks, loss, pairs, width, kind, without
                        shown = "".join(f"{one:>10}" for one in run_ranks(*job, timeout=600.0)[0])
                        print(f"  {batch:<32}{shown}", flush=True)
                        continue
                    given = "equal" if sizes == "equal" else None
                    settings = loss, pairs, width, kind, given, args.seconds, without
                    ranks = run_ranks(on_rank, args.ranks, *settings, timeout=600.0)
                    print(f"  {batch:<32}{figures(ranks)}", flush=True)


def figures(ranks: list[dict[str, list[float]]]) -> str:
    """The medians, and allgrad relative to others."""
    found = {
        name: statistics.median(map(max, zip(*(r[name] for r in ranks), strict=True)))
        for name in ranks[0]
    }
    whole = [found[name] for name in ("whole", "rows") if name in found]
    others = [min(whole, default=None), found.get("local"), found.get("16 bits")]
    against = "".join(f"{found['allgrad'] / one:6.2f}" for one in others if one)
    return "".join(f"{one:10.3f}" for one in found.values()) + "   " + against


if __name__ == "__main__":
    main()
