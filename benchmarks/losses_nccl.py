"""``clip_loss`` beside open_clip's formula over NCCL ranks that share one GPU: host time and calls.

    NCCL_MULTI_RANK_GPU_ENABLE=1 python benchmarks/losses_nccl.py [--ranks 2 4] [--pairs 512 4096]
                                                                  [--width 512] [--repeats 50]

open_clip's ``ClipLoss(local_loss=True, gather_with_grad=True)`` gathers both sides with
torch.distributed.nn and computes the rows of the own samples in both directions; the formula is
written here. Host time is until ``backward`` returns, without waiting for the device; the other is
until the device is done. Medians of the slowest rank, implementations in turns, bfloat16.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch.nn.functional import cross_entropy, normalize

from allgrad._wire.groups import find_group
from allgrad.losses import clip_loss
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def open_clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    images, texts = (torch.cat(dist_nn.all_gather(x)) for x in (image, text))
    target = torch.arange(len(image), device=image.device) + dist.get_rank() * len(image)
    factor = scale.to(image.dtype)
    rows = cross_entropy(factor * image @ texts.T, target)
    return (rows + cross_entropy(factor * text @ images.T, target)) / 2


WAYS: dict[str, Callable[..., Tensor]] = {
    "allgrad": lambda i, t, s: clip_loss(i, t, s, sizes="equal"),
    "allgrad, sizes found": clip_loss,
    "allgrad, ring": lambda i, t, s: clip_loss(i, t, s, sizes="equal", ring=True),
    "open_clip": open_clip,
}


def collectives_of(step: Callable[[], object]) -> int:
    """The collectives of one step: ours as the group counts them, others as the profiler sees them.

    A profiler does not see the calls of a ring, which another thread makes.
    """
    group = find_group("losses_nccl", None)
    before = group.calls
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    names = [event.name for event in profile.events()]
    return group.calls - before or sum(name.startswith("nccl:") for name in names)


def on_rank(pairs: int, width: int, repeats: int) -> dict[str, tuple[list[float], ...]]:
    """Host and device milliseconds of each step, and the number of collectives, by implementation."""
    world = dist.get_world_size()
    made = (torch.randn(pairs // world, width, device="cuda") for _ in range(2))
    features = [normalize(x, dim=1).bfloat16().requires_grad_() for x in made]
    scale = torch.tensor(20.0, device="cuda", requires_grad=True)
    host: dict[str, list[float]] = {name: [] for name in WAYS}
    device: dict[str, list[float]] = {name: [] for name in WAYS}

    def step(name: str) -> None:
        for x in (*features, scale):
            x.grad = None
        WAYS[name](*features, scale).backward()

    for name in WAYS:
        for _ in range(4):  # from then on a call that finds sizes out is expected
            step(name)
    calls = {name: [float(collectives_of(lambda name=name: step(name)))] for name in WAYS}
    order = random.Random(0)  # noqa: S311  the same on every rank
    for _ in range(repeats):
        for name in order.sample(list(WAYS), len(WAYS)):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            step(name)
            host[name].append((time.perf_counter() - start) * 1e3)
            torch.cuda.synchronize()
            device[name].append((time.perf_counter() - start) * 1e3)
    return {name: (host[name], device[name], calls[name]) for name in WAYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, D {args.width}")
    for world in args.ranks:
        for pairs in args.pairs:
            job = pairs, args.width, args.repeats
            ranks = run_ranks(on_rank, world, *job, backend="nccl", timeout=300.0)
            print(f"{world} ranks, {pairs} pairs in all{'host ms':>20}{'done ms':>12}{'calls':>8}")
            for name in WAYS:
                host, done, calls = (
                    statistics.median(map(max, zip(*(r[name][i] for r in ranks), strict=True)))
                    for i in range(3)
                )
                print(f"  {name:<32}{host:12.3f}{done:12.3f}{calls:8.0f}", flush=True)


if __name__ == "__main__":
    main()
