"""The part of a measurement that runs on one rank: check each implementation, measure time or memory."""

from __future__ import annotations

import random
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from allgrad._wire.algorithms import using
from allgrad._wire.world import rank_of
from allgrad.cli.bench.baselines import barrier, implementations_of
from allgrad.cli.bench.cases import expected, inputs_and_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from allgrad.cli.bench.baselines import Implementation
    from allgrad.cli.bench.cases import Case

__all__ = ["PeakMemory", "Times", "measure_memory", "measure_time"]


@dataclass(slots=True)
class Times:
    """One implementation on one rank: what was wrong (if anything), and seconds of each sample."""

    wrong: str
    forward: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peak memory in bytes above the memory before the call; the result is included."""

    result: int
    forward: int
    both: int


def measure_time(
    case: Case,
    repeats: int,
    calls: int,
    peers: Sequence[str] | None = None,
    every_algorithm: bool = False,
) -> dict[str, Times]:
    """Time every implementation, one after another, in a new random order for each round.

    A sample is ``calls`` calls with one backward pass, as in a training step.
    """
    warnings.simplefilter("ignore", FutureWarning)
    rank = rank_of()
    implementations = implementations_of(case, rank, peers, every_algorithm=every_algorithm)
    inputs, gs = _prepare(case, rank, calls)
    want = expected(case, rank)
    times = {
        name: Times(_wrong(implementation, inputs[0], gs, want))
        for name, implementation in implementations.items()
    }
    del want
    names = list(implementations)
    order = random.Random(0)  # noqa: S311 - the same on every rank
    for _ in range(repeats):
        order.shuffle(names)
        for name in names:
            for back, samples in ((False, times[name].forward), (True, times[name].both)):
                barrier()
                began = time.perf_counter()
                _run(implementations[name], inputs, gs, back=back)
                samples.append((time.perf_counter() - began) / calls)
    return times


def measure_memory(case: Case, name: str) -> PeakMemory:
    """Measure the peak memory of one implementation, in a new process."""
    warnings.simplefilter("ignore", FutureWarning)
    rank = rank_of()
    small = replace(case, nbytes=16 * 1024)  # warm-up: libraries are loaded, ranks connected
    implementation = implementations_of(small, rank)[name]
    _run(implementation, *_prepare(small, rank))
    implementation = implementations_of(case, rank)[name]
    inputs, gs = _prepare(case, rank)
    barrier()
    before = _reset_peak()
    with torch.set_grad_enabled(implementation.backward is None):
        ys = implementation.forward(inputs[0])
        forward = _peak() - before
        _backward(implementation, inputs, [ys], gs)
    return PeakMemory(sum(y.nbytes for y in ys), forward, _peak() - before)


def _prepare(case: Case, rank: int, calls: int = 1) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Separate inputs for each call: gradients of a shared input would have to be added."""
    xs, gs = inputs_and_gradients(case, rank)
    return [[x.clone().requires_grad_() for x in xs] for _ in range(calls)], gs


def _backward(
    implementation: Implementation,
    inputs: list[list[Tensor]],
    outputs: list[list[Tensor]],
    gs: list[Tensor],
) -> list[Tensor]:
    """The backward pass of all calls; returns their gradients."""
    if implementation.backward is None:
        xs, ys = [x for xs in inputs for x in xs], [y for ys in outputs for y in ys]
        return list(torch.autograd.grad(ys, xs, gs * len(outputs)))
    return [g for _ in outputs for g in implementation.backward(gs)]


def _run(
    implementation: Implementation,
    inputs: list[list[Tensor]],
    gs: list[Tensor],
    *,
    back: bool = True,
) -> None:
    with _using(implementation), torch.set_grad_enabled(implementation.backward is None):
        if not back:
            for xs in inputs:
                implementation.forward(xs)
            return
        _backward(implementation, inputs, [implementation.forward(xs) for xs in inputs], gs)


def _using(implementation: Implementation) -> AbstractContextManager[None]:
    return using(**implementation.algorithms) if implementation.algorithms else nullcontext()


def _wrong(
    implementation: Implementation,
    xs: list[Tensor],
    gs: list[Tensor],
    want: tuple[list[Tensor], list[Tensor]],
) -> str:
    with _using(implementation), torch.set_grad_enabled(implementation.backward is None):
        ys = implementation.forward(xs)
        gradients = _backward(implementation, [xs], [ys], gs)
    if not all(torch.equal(y, w) for y, w in zip(ys, want[0], strict=True)):
        return "values"
    if not all(torch.equal(g, w) for g, w in zip(gradients, want[1], strict=True)):
        return "gradient"
    return ""


def _reset_peak() -> int:
    """Reset the peak to the memory that is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
