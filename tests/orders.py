"""Random programs whose graph several threads make, on ranks with different histories.

Autograd numbers nodes by thread. Here calls, computations and first backwards happen on several
threads, on each of which each rank has made another number of nodes before.
"""

import random as python_random
from concurrent.futures import ThreadPoolExecutor

import torch

import allgrad as ag
from exactness import leaf, random

LENGTH = 3


class Threads:
    """This thread, one that lives on, and one that is new each time."""

    def __init__(self):
        self.second = ThreadPoolExecutor(1)

    def run(self, where, function, *args):
        if where == "main":
            return function(*args)
        if where == "second":
            return self.second.submit(function, *args).result()
        with ThreadPoolExecutor(1) as fresh:
            return fresh.submit(function, *args).result()


def make_nodes(up_to):
    """Let this thread make autograd nodes until it has made so many in its life."""
    x = torch.ones(1, requires_grad=True)
    while torch.autograd._get_sequence_nr() < up_to:
        x * 1
    return torch.autograd._get_sequence_nr()


def make_history(threads, ahead, device):
    """Let one thread be ahead of the other: of two that live on, or of this one and autograd's own."""
    if device == "cpu":
        behind = {"main": "second", "second": "main"}[ahead]
        threads.run(ahead, make_nodes, threads.run(behind, make_nodes, 0) + 300)
    elif ahead == "main":
        make_nodes(torch.autograd._get_sequence_nr() + 2000)
    else:
        x = torch.ones(1, device=device, requires_grad=True)
        y = x
        for _ in range(300):
            y = y.sin()
        torch.autograd.grad(y, x, create_graph=True)


def random_steps(seed, places):
    """Steps of a program: where each runs, what it does, and which earlier values it uses."""
    draw = python_random.Random(seed)
    steps, values = [], 2
    for _ in range(draw.randint(4, 9)):
        picked = sorted(draw.sample(range(values), min(values, draw.choice([1, 1, 2]))))
        steps.append((draw.choice(places), draw.choice(["call", "call", "local"]), picked))
        values += 1
    order = draw.choice(["first", "second"])
    first_backward = draw.choice(places)
    used = sorted(draw.sample(range(2, values), draw.randint(values // 2, values - 2)))
    return steps, order, first_backward, used


def local(xs):
    return sum(x.sin() * (i + 1) for i, x in enumerate(xs))


def on_rank(seed, rank, threads, places, device="cpu"):
    """The gradient of this rank's pieces by the sum of all ranks' losses."""
    steps, order, first_backward, used = random_steps(seed, places)
    histories = python_random.Random(1000 * seed + rank)
    make_history(threads, histories.choice(["main", "second"]), device)
    leaves = [leaf(random((LENGTH,), 10 * seed + 2 * rank + i).to(device)) for i in range(2)]
    values = list(leaves)

    def run(kind, xs):
        return ag.all_reduce(local(xs)) if kind == "call" else local(xs)

    for place, kind, picked in steps:
        values.append(threads.run(place, run, kind, [values[i] for i in picked]))

    def total(weights_seed):
        return sum(
            (random((LENGTH,), 31 * weights_seed + 7 * i + rank).to(device) * values[i].cos()).sum()
            for i in used
        )

    def first():
        return torch.autograd.grad(
            total(seed), leaves, create_graph=True, allow_unused=True, materialize_grads=True
        )

    loss = total(seed)
    if order == "second":
        gradients = threads.run(first_backward, first)
        loss = total(seed + 1) + sum(ag.all_reduce(g.sin()).square().sum() for g in gradients)
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [g.cpu() for g in found]


def in_one_process(seed, world, places):
    """The same of all ranks, in plain torch."""
    steps, order, _, used = random_steps(seed, places)
    leaves = [
        [leaf(random((LENGTH,), 10 * seed + 2 * r + i)) for r in range(world)] for i in range(2)
    ]
    values = list(leaves)
    for _, kind, picked in steps:
        by_rank = [local([values[i][r] for i in picked]) for r in range(world)]
        values.append([sum(by_rank)] * world if kind == "call" else by_rank)

    def total(weights_seed):
        by_rank = [
            (random((LENGTH,), 31 * weights_seed + 7 * i + r) * values[i][r].cos()).sum()
            for i in used
            for r in range(world)
        ]
        return sum(by_rank)

    flat = [x for by_rank in leaves for x in by_rank]
    unused = {"allow_unused": True, "materialize_grads": True}
    loss = total(seed)
    if order == "second":
        g = torch.autograd.grad(loss, flat, create_graph=True, **unused)
        sums = [sum(x.sin() for x in g[i * world : (i + 1) * world]) for i in range(2)]
        loss = total(seed + 1) + world * sum(s.square().sum() for s in sums)
    found = torch.autograd.grad(loss, flat, **unused)
    return [[found[i * world + r] for i in range(2)] for r in range(world)]
