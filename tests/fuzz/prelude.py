"""What every random program may use; a printed program carries this text with it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Box:
    first: Any
    second: Any


def leaf(rank, shape, kind, seed, needs_grad):
    """A tensor of its own on every rank: "normal" numbers, "ties" of -1, 0, 1, "int" or "bool"."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    if kind == "normal":
        made = torch.randn(shape, generator=random, dtype=torch.float64)
    else:
        whole = torch.randint(-1, 2, shape, generator=random)
        made = {"ties": whole.double(), "int": whole, "bool": whole > 0}[kind]
    return made.requires_grad_(needs_grad and made.is_floating_point())


def thread(function, x):
    """What the function gives, computed on another thread."""
    return second_thread().submit(function, x).result()


THREADS = []  # not a cache: a printed program is pickled


def second_thread():
    """A thread with a history: on a new one calls cannot always be ordered, and raise."""
    if not THREADS:
        THREADS.append(ThreadPoolExecutor(1))
        THREADS[0].submit(history, 3000).result()
    return THREADS[0]


def no_grad(function, x):
    with torch.no_grad():
        return function(x)


def history(nodes):
    """Make nodes of autograd that nobody uses."""
    x = torch.zeros((), requires_grad=True)
    for _ in range(nodes):
        x = x + 1


def tangent(rank, shape, seed):
    """A direction of its own for every leaf of every rank."""
    random = torch.Generator().manual_seed(1000 * seed + rank + 500)
    return torch.randn(shape, generator=random, dtype=torch.float64)


def along(gradients, tangents):
    return sum((g * t).sum() for g, t in zip(gradients, tangents, strict=True))


def duals(function, xs, tangents):
    """The tangent of a function of dual numbers."""
    with forward_ad.dual_level():
        made = [forward_ad.make_dual(x, t) for x, t in zip(xs, tangents, strict=True)]
        value, moved = forward_ad.unpack_dual(function(*made))
        return (torch.zeros_like(value) if moved is None else moved,)


def use(x, rank):
    """A number in which every element counts differently, and differently on every rank."""
    x = (torch.view_as_real(x) if x.is_complex() else x).double()
    weights = torch.linspace(1, 2 + rank, x.numel(), dtype=torch.float64).view(x.shape)
    return (weights * x).sin().sum()
