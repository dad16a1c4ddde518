"""Bad input: on every rank the same class of error, and a group that works afterwards."""

import pytest
import torch
import torch.distributed as dist

import allgrad.compat.torch_distributed_nn as compat
from allgrad.errors import (
    GroupError,
    InputError,
    PieceMismatch,
    ReductionError,
    SizesError,
    TensorError,
)
from refusals import raises_everywhere


@pytest.mark.ranks(3)
def test_root_outside_the_group(rank):
    x, xs = torch.zeros(2), [torch.zeros(2)] * 3
    for call in (
        lambda: compat.broadcast(x, 3),
        lambda: compat.reduce(x, -1),
        lambda: compat.gather(x, 3),
        lambda: compat.scatter(xs, 7),
    ):
        raises_everywhere(GroupError, call, "is not in the group", "[0, 1, 2]")
    group = dist.new_group([0, 2])
    if rank != 1:
        with pytest.raises(GroupError, match=r"global rank 1 is not in the group.*\n.*\[0, 2\]"):
            compat.broadcast(x, 1, group)


@pytest.mark.ranks(3)
def test_reduction_without_meaning(rank):
    x = torch.zeros(2, dtype=torch.int64)
    for call in (
        lambda: compat.all_reduce(x, dist.ReduceOp.BAND),
        lambda: compat.reduce(x, 0, dist.ReduceOp.BXOR),
        lambda: compat.reduce_scatter(x, [x] * 3, "median" if rank == 1 else "sum"),
    ):
        raises_everywhere(ReductionError, call, "no exact reduction")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["all_gather", "gather"])
def test_piece_that_does_not_fit(rank, name):
    call = getattr(compat, name)
    x = torch.zeros(2, 4 if rank == 2 else 8)
    raises_everywhere(
        PieceMismatch,
        lambda: call(x),
        f"{name}: pieces may differ along dim 0 only.",
        "  rank 2: (2, 4) float32   <- differs in dim 1\n",
    )
    raises_everywhere(TensorError, lambda: call([x] if rank == 0 else x), "is list, not a tensor")


@pytest.mark.ranks(3)
def test_lists_that_do_not_fit(rank):
    x = torch.zeros(2)

    def xs(bad):
        return bad if rank == 1 else [x, x, x]

    outs = [torch.zeros(2) for _ in range(3)]
    for bad, error, part in (
        ([x, x], InputError, "has 2 tensors"),
        ([x, x, x.double()], PieceMismatch, "several dtypes"),
        ([x, x, 1.0], TensorError, "not a list of tensors"),
        (x, TensorError, "not a list of tensors"),
        (None, TensorError, "not a list of tensors"),
    ):
        raises_everywhere(error, lambda bad=bad: compat.scatter(xs(bad), 1), "scatter", part)
        raises_everywhere(
            error, lambda bad=bad: compat.reduce_scatter(torch.zeros(2), xs(bad)), part
        )
        raises_everywhere(error, lambda bad=bad: compat.all_to_all(outs, xs(bad)), part)
        raises_everywhere(error, lambda bad=bad: compat.all_to_all(xs(bad), outs), part)
    ragged = [x, torch.zeros(3), x]
    raises_everywhere(PieceMismatch, lambda: compat.scatter(xs(ragged), 1), "(2,), (3,), (2,)")
    raises_everywhere(
        PieceMismatch, lambda: compat.reduce_scatter(x, xs([torch.zeros(3), x, x])), "3 tensors"
    )


@pytest.mark.ranks(3)
def test_tensor_that_cannot_travel(rank):
    x = torch.zeros(3)
    odd = x.to_sparse() if rank == 1 else x
    for call in (
        lambda: compat.all_gather(odd),
        lambda: compat.gather(odd),
        lambda: compat.scatter([odd] * 3, 1),
        lambda: compat.reduce_scatter(x.clone(), [odd] * 3),
        lambda: compat._all_gather_base(torch.zeros(9), odd),
        lambda: compat.all_to_all([x.clone()] * 3, [odd] * 3),
        lambda: compat.all_to_all_single(x.clone(), odd),
    ):
        raises_everywhere(TensorError, call, "x is sparse_coo; only dense tensors travel")


@pytest.mark.ranks(3)
def test_shapes_that_differ_by_rank(rank):
    x = torch.zeros(2, 5 if rank == 1 else 4)
    raises_everywhere(
        PieceMismatch,
        lambda: compat.reduce_scatter(torch.zeros_like(x), [x] * 3),
        "reduce_scatter: all ranks have one shape.",
        "rank 1: (2, 5) float32   <- differs in dim 1",
    )
    raises_everywhere(
        PieceMismatch,
        lambda: compat._all_gather_base(torch.zeros(3 * x.numel()), x),
        "rank 1: (2, 5) float32   <- differs in dim 1",
    )


@pytest.mark.ranks(3)
def test_output_that_does_not_fit(rank):
    x = torch.zeros(3)
    small = torch.zeros(2 if rank == 1 else 3)
    other = torch.zeros(3, dtype=torch.float64 if rank == 1 else torch.float32)
    nothing = None if rank == 1 else x.clone()
    for call in (
        lambda out: compat.reduce_scatter(out, [x] * 3),
        lambda out: compat._all_gather_base(out, x[:1]),
        lambda out: compat.all_to_all_single(out, x),
    ):
        raises_everywhere(SizesError, lambda call=call: call(small))
        raises_everywhere(TensorError, lambda call=call: call(other), "output is torch.float64")
        raises_everywhere(TensorError, lambda call=call: call(nothing), "is NoneType")
    outputs = [torch.zeros(1), torch.zeros(2 if rank == 1 else 1), torch.zeros(1)]
    raises_everywhere(
        SizesError,
        lambda: compat.all_to_all(outputs, [x[:1]] * 3),
        "room for [1, 2, 1] elements by rank, but [1, 1, 1] arrive",
        "<- ",
    )


@pytest.mark.ranks(3)
def test_split_sizes_that_do_not_fit(rank):
    x, out = torch.zeros(4), torch.zeros(6)
    raises_everywhere(
        SizesError,
        lambda: compat.all_to_all_single(out, x),
        "4 rows do not divide by 3 ranks",
        "Give input_split_sizes, one size for each rank",
    )
    raises_everywhere(
        SizesError,
        lambda: compat.all_to_all_single(out, x, None, [2, 1, 2 if rank == 0 else 1]),
        "input_split_sizes=[2, 1, 2] add up to 5",
    )
    raises_everywhere(
        SizesError,
        lambda: compat.all_to_all_single(out, out, [2, 4] if rank == 2 else None),
        "output_split_sizes has 2 entries",
    )
    receive = [1, 2, 3] if rank == 2 else [2, 2, 2]
    raises_everywhere(
        SizesError,
        lambda: compat.all_to_all_single(out, out, receive),
        "room for [1, 2, 3] elements by rank, but [2, 2, 2] arrive",
    )
    for bad, words in (
        (torch.tensor(6), "output_split_sizes=tensor(6)"),
        (6, "output_split_sizes=6"),
        (torch.tensor([2.0, 2.0, 2.0]), "whole numbers from 0 up"),
        (torch.tensor([2, 4]), "output_split_sizes has 2 entries"),
    ):
        odd = bad if rank == 1 else [2, 2, 2]
        raises_everywhere(
            SizesError, lambda odd=odd: compat.all_to_all_single(out, out, odd), words
        )
