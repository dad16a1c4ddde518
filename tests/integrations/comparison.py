"""A loss three ways, on two ranks in DDP against one process: alone, with the library's gather, with ours."""

from __future__ import annotations

import copy
import importlib.util
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allgrad.testing import RankFailed, RanksStuck, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

UNEQUAL, EQUAL = (3, 1), (2, 2)


def needs(module, extra):
    """A mark that skips a module's tests where its library is missing, without importing it."""
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"needs pip install 'allgrad[{extra}]'")


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


class Towers(nn.Module):
    """Two linear towers in float64 and a scale: pairs (rows, 2, 4) to left, right and scale."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return self.scale * self.left(x[:, 0]), self.right(x[:, 1]), self.scale.clone()


class Comparison(NamedTuple):
    """Three functions ``loss(model, batch)``; ``theirs`` may be absent."""

    alone: Callable
    ours: Callable
    theirs: Callable | None = None
    make_model: Callable = Towers

    def difference(self, way, rows):
        """The largest difference of any gradient on any rank, and the largest gradient alone."""
        model, batch = self.make_model(), random(sum(rows), 2, 4, seed=7)
        expected = gradients(self.alone, copy.deepcopy(model), batch)
        found = run_ranks(on_rank, 2, getattr(self, way), model, batch, rows, timeout=60)
        both = [pair for grads in found for pair in zip(grads, expected, strict=True)]
        return max((a - b).abs().max().item() for a, b in both), largest(expected)

    def describe(self, way, rows):
        """The difference in words, for the table."""
        try:
            off, most = self.difference(way, rows)
        except RankFailed as failed:
            if any(error.how == "died" for error in failed.failures.values()):
                return "aborts"
            summary = failed.failures[min(failed.failures)].summary
            return "no gradient" if "does not require grad" in summary else summary.split(":")[0]
        except RanksStuck:
            return "hangs"
        return "exact" if off <= 1e-10 * most else f"off by {off:.2g} of {most:.2g}"

    def check(self):
        for rows in (UNEQUAL, EQUAL):
            off, most = self.difference("ours", rows)
            assert most > 1e-3
            assert off <= 1e-10 * most, (rows, off, most)


def gradients(loss, model, batch):
    loss(model, batch).backward()
    return [parameter.grad for parameter in model.parameters()]


def on_rank(loss, model, batch, rows):
    """The gradients of this rank after DDP's mean."""
    piece = batch.split(rows)[dist.get_rank()]
    return gradients(loss, nn.parallel.DistributedDataParallel(model), piece)


def largest(tensors):
    return max(x.abs().max().item() for x in tensors)
