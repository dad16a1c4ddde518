"""User code that mypy --strict and pyright accept (test_typing.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import assert_type

import allgrad as ag
from allgrad.losses import clip_loss
from allgrad.testing import ParityReport, parity
from allgrad.types import Grad, GroupLike, Handle, Op, Sizes
from allgrad.wrappers import gradient_scale, sum_gradients


@dataclass
class Batch:
    images: Tensor
    labels: Tensor


def tensors(x: Tensor, group: GroupLike, sizes: Sizes, grad: Grad, op: Op) -> Tensor:
    joined = assert_type(ag.all_gather(x, sizes=sizes, group=group, grad=grad), Tensor)
    total = assert_type(ag.all_reduce(joined, op, group=group), Tensor)
    own = ag.reduce_scatter(total, 0, "mean", sizes="equal") + ag.split(total, sizes=[1, 2])
    return ag.scan(own, exclusive=True, grad="none") + ag.shift(ag.permute(x, [(0, 1)]), -1)


def handles(x: Tensor) -> Tensor:
    handle = assert_type(ag.all_gather(x, async_op=True), Handle[Tensor])
    other = ag.broadcast({"x": x}, async_op=True)
    return handle.wait().sum() + other.wait()["x"]


def nests(x: Tensor, batch: Batch) -> Tensor:
    in_dict = assert_type(ag.all_gather({"a": x, "b": x}), "dict[str, Tensor]")
    in_list = assert_type(ag.all_reduce([x, x]), "list[Tensor]")
    first, second = assert_type(ag.reduce((x, x), dst=1), "tuple[Tensor, Tensor]")
    joined = assert_type(ag.all_gather(batch), Batch)
    return in_dict["a"] + in_list[0] + first + second + joined.images


def uneven(loader: list[Batch]) -> None:
    for batch, sizes in ag.join(loader):
        assert_type(batch, Batch)
        assert_type(sizes, "tuple[int, ...]")


def step(model: nn.Module, batch: Batch) -> Tensor:
    return clip_loss(model(batch.images), batch.images, torch.tensor(1.0))


def make_batch(step: int, rank: int, ranks: int) -> Batch:
    return Batch(torch.zeros(step, ranks), torch.zeros(rank))


def proofs() -> None:
    report = parity(lambda: nn.Linear(2, 2), make_batch, step)
    assert_type(report, ParityReport)
    model = sum_gradients(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    assert_type(gradient_scale(model).factor, float)


def reductions(x: Tensor) -> None:
    ag.all_reduce(x, dist.ReduceOp.MAX)
    ag.all_reduce(x, "logsumexp")


def off_src(x: Tensor, rank: int) -> Tensor:
    piece = assert_type(ag.scatter(x if rank == 0 else None), Tensor)
    return piece + ag.scatter(None) + ag.scatter(None, async_op=True).wait()


def lengths(x: Tensor) -> list[int]:
    sizes = assert_type(ag.gather_sizes(x), "tuple[int, ...]")
    received, counts = ag.all_to_all(x, send_sizes=sizes, return_sizes=True)
    back: Tensor = ag.all_to_all(received, send_sizes=counts, recv_sizes=sizes)
    return [*sizes, len(back)]


def safety(x: Tensor) -> None:
    try:
        with (
            ag.lockstep() as step,
            ag.checked(),
            ag.deadline(30),
            ag.recorded("recording", calls=100),
        ):
            loss = ag.all_reduce(x).sum()
        step.backward(loss)
    except ag.errors.RankLost:
        torch.distributed.destroy_process_group()
