"""Layers beside the same written by hand: interleaved, forward and backward, medians.

python benchmarks/layers.py             four CPU ranks
python benchmarks/layers.py linears     of them, the rows with this word
python benchmarks/layers.py --cuda      attention in a world of one, beside torch's
python benchmarks/layers.py --alone     the same on the CPU
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from allgrad.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    SyncBatchNorm,
    combine,
    dispatch,
    ring_attention,
)
from allgrad.testing import run_ranks

ROUNDS = 60


class SumOverRanks(torch.autograd.Function):
    """A sum both ways, by raw calls."""

    @staticmethod
    def forward(_ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(_ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class CopyToRanks(torch.autograd.Function):
    """Nothing forward, a sum backward."""

    @staticmethod
    def forward(_ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(_ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class SumOnce(torch.autograd.Function):
    """A sum forward, nothing backward."""

    @staticmethod
    def forward(_ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(_ctx, g):
        return g


def batch_norm_by_hand(x, weight, bias):
    """One packed sum of sums, squares and the count; loses digits where the mean is large."""
    dims = [d for d in range(x.dim()) if d != 1]
    c = x.shape[1]
    count = x.new_full((1,), x.numel() / c)
    packed = SumOverRanks.apply(torch.cat([x.sum(dims), x.square().sum(dims), count]))
    mean = packed[:c] / packed[-1]
    variance = packed[c : 2 * c] / packed[-1] - mean.square()
    shape = [1, c, *[1] * (x.dim() - 2)]
    scale = (weight * (variance + 1e-5).rsqrt()).view(shape)
    return (x - mean.view(shape)) * scale + bias.view(shape)


def batch_norm(shape):
    x = torch.randn(shape, requires_grad=True)
    ours = SyncBatchNorm(shape[1])
    ours.running_mean = ours.running_var = ours.num_batches_tracked = None
    ours.track_running_stats = False
    hand = nn.BatchNorm1d(shape[1])
    return {
        "allgrad": lambda: ours(x),
        "by hand": lambda: batch_norm_by_hand(x, hand.weight, hand.bias),
    }


def experts_by_hand(x, routing, experts):
    """With torch.distributed.nn: sizes exchanged once, tokens there and back."""
    world = dist.get_world_size()
    order = routing.argsort(stable=True)
    counts = torch.bincount(routing, minlength=experts)
    got = torch.empty_like(counts)
    dist.all_to_all_single(got, counts)
    send = counts.view(world, -1).sum(1).tolist()
    receive = got.view(world, -1).sum(1).tolist()
    there = x.new_empty(sum(receive), x.shape[1])
    tokens = dist_nn.all_to_all_single(there, x[order], receive, send)
    local = torch.arange(experts // world).repeat(world).repeat_interleave(got)
    by_expert = local.argsort(stable=True)
    y = tokens[by_expert] * 2
    y = y[by_expert.argsort()]
    back = dist_nn.all_to_all_single(x.new_empty(x.shape), y, send, receive)
    return back[order.argsort()]


def mixture(tokens, width, experts=16):
    x = torch.randn(tokens, width, requires_grad=True)
    routing = torch.randint(experts, (tokens,))

    def ours():
        sent = dispatch(x, routing, experts=experts)
        return combine(sent.tokens * 2, sent)

    return {"allgrad": ours, "torch.distributed.nn": lambda: experts_by_hand(x, routing, experts)}


def linears(tokens, width):
    x = torch.randn(tokens, width, requires_grad=True)
    first, second = ColumnParallelLinear(width, 4 * width), RowParallelLinear(4 * width, width)
    parts = first.weight, first.bias, second.weight, second.bias

    def by_hand():
        h = linear(CopyToRanks.apply(x), parts[0], parts[1]).relu()
        return SumOnce.apply(linear(h, parts[2])) + parts[3]

    return {"allgrad": lambda: second(first(x).relu()), "by hand": by_hand}


CASES = {
    "SyncBatchNorm (8, 64, 28, 28)": (batch_norm, (8, 64, 28, 28)),
    "SyncBatchNorm (64, 256)": (batch_norm, (64, 256)),
    "dispatch + combine, 512 tokens of 128": (mixture, 512, 128),
    "dispatch + combine, 4096 tokens of 512": (mixture, 4096, 512),
    "linears, 64 tokens of 128": (linears, 64, 128),
    "linears, 512 tokens of 256": (linears, 512, 256),
}


def measure(make, *args, rounds=ROUNDS, wait=lambda: None):
    """Median milliseconds of each way, in turns; their results agree."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    ways = make(*args)
    results = [way().detach() for way in ways.values()]
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=2e-2, atol=2e-3)
    times = {name: [] for name in ways}
    for turn in range(rounds):
        for name in list(ways) if turn % 2 else list(ways)[::-1]:
            if dist.is_initialized():
                dist.barrier()
            wait()
            start = time.perf_counter()
            ways[name]().sum().backward()
            wait()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[rounds // 6 :]) * 1e3 for name, taken in times.items()}


def on_rank(name):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    make, *args = CASES[name]
    return measure(make, *args)


def attention(length, causal, device="cuda", heads=16, dtype=torch.bfloat16):
    options = {"device": device, "dtype": dtype, "requires_grad": True}
    q, k, v = (torch.randn(2, heads, length, 128, **options) for _ in range(3))
    return {
        "allgrad": lambda: ring_attention(q, k, v, causal=causal),
        "torch": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal),
    }


def show(name, times):
    ours, *others = times.items()
    for other, taken in others:
        print(f"{name:40} {ours[1]:8.3f} ms   {other} {taken:8.3f} ms   {ours[1] / taken:.2f}")


def main():
    if "--cuda" in sys.argv:
        for length in (128, 1024, 4096, 16384):
            for causal in (False, True):
                rounds = 5 * ROUNDS if length <= 1024 else ROUNDS  # the host's time varies more
                times = measure(
                    attention, length, causal, rounds=rounds, wait=torch.cuda.synchronize
                )
                show(f"ring_attention alone, {length}, causal={causal}", times)
        return
    if "--alone" in sys.argv:
        torch.set_num_threads(1)
        for length in (64, 256, 1024):
            times = measure(attention, length, False, "cpu", 4, torch.float32)
            show(f"ring_attention alone, CPU, {length}", times)
        return
    for name in [name for name in CASES if all(word in name for word in sys.argv[1:])]:
        times = run_ranks(on_rank, 4, name, timeout=300.0)
        slowest = {way: max(one[way] for one in times) for way in times[0]}
        show(name, slowest)


if __name__ == "__main__":
    main()
