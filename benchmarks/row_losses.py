"""Losses over rows beside their formula over all scores, on one process, in turns: forward and backward.

    python benchmarks/row_losses.py [--device cuda] [--dtype float32] [--width 256]
                                    [--pairs 32 128 512 2048 4096] [--rounds 30] [--eager]

The formulas are those of ``allgrad.losses.reference`` in the features' dtype, eager and compiled (not with
``--eager``); they keep all scores. ``cross_entropy`` has 8,192 words, ``maxsim_loss`` 8 tokens a sample, up to 512 samples. Times are
medians in ms, the device waited for.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import normalize

from allgrad import losses
from allgrad.losses import reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Step = Callable[[], None]

WORDS, TOKENS, MOST_SAMPLES = 8192, 8, 512
SCALE = 20.0


def maxsim_dense(query: Tensor, document: Tensor, scale: Tensor) -> Tensor:
    scores = torch.einsum("qid,kjd->qkij", query, document).amax(3).sum(2)
    target = torch.arange(len(query), device=query.device)
    return torch.nn.functional.cross_entropy(scale * scores, target)


def cases(pairs: int, width: int, dtype: torch.dtype, device: str) -> dict[str, list[Step]]:
    """For each loss, a step of ours, of the formula, and of the formula compiled."""

    def features(*shape: int) -> Tensor:
        x = torch.randn(shape, device=device)
        return normalize(x, dim=-1).to(dtype).requires_grad_()

    query, key, words = features(pairs, width), features(pairs, width), features(WORDS, width)
    scale = torch.tensor(SCALE, device=device, requires_grad=True)
    ids = torch.randint(max(1, pairs // 4), (pairs,), device=device)
    targets = torch.randint(WORDS, (pairs,), device=device)
    found = {
        "supcon": _steps(losses.supcon_loss, reference.supcon, query, key, scale, ids, ids),
        "multiple_negatives": _steps(
            partial(losses.multiple_negatives_loss, ids=ids),
            partial(reference.multiple_negatives, ids=ids),
            *(query, key, scale),
        ),
        "cross_entropy": _steps(
            losses.cross_entropy, reference.cross_entropy, query, words, targets
        ),
    }
    if pairs <= MOST_SAMPLES:
        tokens = [features(pairs, TOKENS, width) for _ in range(2)]
        found["maxsim"] = _steps(losses.maxsim_loss, maxsim_dense, *tokens, scale)
    return found


def _steps(
    ours: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor
) -> list[Step]:
    def step(loss: Callable[..., Tensor]) -> None:
        loss(*inputs).backward()
        for x in inputs:
            x.grad = None

    compiled = torch.compile(formula, dynamic=False)
    return [partial(step, loss) for loss in (ours, formula, compiled)]


def milliseconds(step: Step, *, wait: bool) -> float:
    began = time.perf_counter()
    step()
    if wait:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pairs", type=int, nargs="+", default=[32, 128, 512, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    dtype, wait = getattr(torch, given.dtype), given.device == "cuda"
    print(f"{given.device}, torch {torch.__version__}, {given.dtype}, width {given.width}")
    print(f"{'':34}{'allgrad':>10}{'formula':>10}{'compiled':>10}")
    for pairs in given.pairs:
        for name, steps in cases(pairs, given.width, dtype, given.device).items():
            del steps[2 if given.eager else 3 :]
            times: list[list[float]] = [[] for _ in steps]
            for number in range(3 + given.rounds):
                for i in random.sample(range(len(steps)), len(steps)):
                    took = milliseconds(steps[i], wait=wait)
                    if number >= 3:
                        times[i].append(took)
            row = "".join(f"{statistics.median(one):10.2f}" for one in times)
            print(f"{name:20}{pairs:>10} pairs{row[2:]}", flush=True)


if __name__ == "__main__":
    main()
