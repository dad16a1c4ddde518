"""Bad input: an error class on every rank, a table of what each rank had, a group that still works."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import allgrad as ag
from allgrad.errors import (
    GroupError,
    InputError,
    PieceMismatch,
    RankRaised,
    ReductionError,
    SizesError,
    TensorError,
)
from refusals import raises_everywhere

EXCHANGING = {
    "all_gather": ag.all_gather,
    "gather": lambda x, dim=0: ag.gather(x, 1, dim),
    "gather_sizes": ag.gather_sizes,
    "permute": lambda x, dim=0: ag.permute(x, [(0, 1)], dim=dim),
    "all_to_all": ag.all_to_all,
}


SENDING_ELSEWHERE = {
    "permute": (lambda x, odd: ag.permute(x, [(0, 2)] if odd else [(0, 1)]), "other pairs"),
    "shift": (lambda x, odd: ag.shift(x, 2 if odd else 1), "other offset and wrap"),
    "gather": (lambda x, odd: ag.gather(x, 1 if odd else 0), "1, not 0"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", SENDING_ELSEWHERE)
def test_a_rank_that_sends_elsewhere_is_named(rank, name):
    """One of them waited for a piece that nobody sends it."""
    call, odd = SENDING_ELSEWHERE[name]
    raises_everywhere(
        PieceMismatch, lambda: call(torch.zeros(2), rank == 1), f"{name}: the ranks", f"<- {odd}\n"
    )


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", EXCHANGING)
def test_width_mismatch_names_the_rank(rank, name):
    x = torch.zeros(3, 4 if rank == 2 else 8)
    raises_everywhere(
        PieceMismatch,
        lambda: EXCHANGING[name](x),
        f"{name}: pieces may differ along dim 0 only.",
        "  rank 0: (3, 8) float32\n",
        "  rank 2: (3, 4) float32   <- differs in dim 1\n",
        "Give every rank the same length in dim 1 before the call.",
    )


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", [*EXCHANGING, "reduce_scatter"])
def test_other_dtype_names_the_rank(rank, name):
    x = torch.zeros(3, dtype=torch.float64 if rank == 1 else torch.float32)
    call = EXCHANGING.get(name, ag.reduce_scatter)
    raises_everywhere(
        PieceMismatch, lambda: call(x), "one dtype", "  rank 1: (3,) float64   <- not float32\n"
    )


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", [*EXCHANGING, "reduce_scatter"])
def test_other_number_of_dimensions_names_the_rank(rank, name):
    x = torch.zeros((3, 1) if rank == 0 else (3,))
    call = EXCHANGING.get(name, ag.reduce_scatter)
    raises_everywhere(PieceMismatch, lambda: call(x), "rank 0: (3, 1)", "<- 2 dimensions, not 1")


@pytest.mark.ranks(3)
def test_other_dim_names_the_rank(rank):
    raises_everywhere(
        PieceMismatch,
        lambda: ag.all_gather(torch.zeros(2, 2), dim=int(rank == 1)),
        "rank 1: (2, 2) float32, dim 1   <- dim 1, not 0",
    )


@pytest.mark.ranks(3)
def test_reduce_scatter_of_unequal_wholes_names_the_rank(rank):
    raises_everywhere(
        PieceMismatch,
        lambda: ag.reduce_scatter(torch.zeros(6 + (rank == 2))),
        "rank 2: (7,) float32   <- differs in dim 0",
    )


@pytest.mark.ranks(3)
def test_different_collectives_are_told_apart(rank):
    x = torch.zeros(3)
    raises_everywhere(
        PieceMismatch,
        lambda: ag.gather(x) if rank == 1 else ag.all_gather(x),
        "different collectives",
        "rank 1: (3,) float32   <- called gather",
    )


@pytest.mark.one_in(4)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", [*EXCHANGING, "reduce_scatter"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_dim_out_of_range_reaches_every_rank(rank, name, everywhere):
    call = EXCHANGING.get(name, ag.reduce_scatter)
    dim = 2 if everywhere or rank == 1 else 0
    raises_everywhere(
        InputError,
        lambda: call(torch.zeros(2, 2), dim),
        "dim=2 is out of range for shape (2, 2)",
        "rank 1: (2, 2) float32   <- dim=2 is out of range",
        "Give a dim from -2 to 1.",
    )


@pytest.mark.ranks(3)
def test_dim_out_of_range_of_split_and_scatter(rank):
    raises_everywhere(InputError, lambda: ag.split(torch.zeros(3), -2), "dim=-2 is out of range")
    x = torch.zeros(3) if rank == 0 else None
    raises_everywhere(InputError, lambda: ag.scatter(x, 0, 1), "dim=1 is out of range", "rank 0")


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("op", ["average", "SUM", None, 3, dist.ReduceOp.BAND])
def test_unknown_reduction(op):
    x = torch.zeros(3)
    for call in (ag.all_reduce, lambda x, op: ag.reduce_scatter(x, 0, op), ag.scan):
        raises_everywhere(ReductionError, lambda call=call: call(x, op), "no exact reduction")
    raises_everywhere(ReductionError, lambda: ag.reduce(x, 0, op), "'logsumexp'")


@pytest.mark.ranks(3)
def test_unknown_reduction_on_one_rank_reaches_all(rank):
    op = "average" if rank == 2 else "sum"
    raises_everywhere(
        ReductionError, lambda: ag.reduce_scatter(torch.zeros(3), op=op), "rank 2", "'average'"
    )


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("root", [3, -1, 1.5, None, True])
def test_src_and_dst_outside_the_group(root):
    x = torch.zeros(3)
    for call in (ag.broadcast, ag.reduce, ag.gather, ag.scatter):
        raises_everywhere(
            GroupError, lambda call=call: call(x, root), "is not a rank of this group"
        )


@pytest.mark.ranks(4)
def test_rank_outside_the_group(rank):
    group = dist.new_group([1, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    if rank in {0, 2}:
        with pytest.raises(GroupError, match=f"global rank {rank}. is not in the group"):
            ag.all_reduce(torch.zeros(1), group=group)
    else:
        assert ag.all_gather(torch.tensor([rank]), group=group).tolist() == [1, 3]
        with pytest.raises(GroupError, match="src=3"):
            ag.broadcast(torch.zeros(1), 3, group=group)
    for bad, part in (
        (mesh, "each of its axes"),
        ((mesh, "c"), "no axis 'c'"),
        (7, "names no ranks"),
    ):
        raises_everywhere(
            GroupError, lambda bad=bad: ag.all_reduce(torch.zeros(1), group=bad), part
        )


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "sizes", [(1, 2), (2, 1, -1), (2, 0, 0.0), "same", (3, 3, 4), (), 3, torch.tensor(3)]
)
def test_sizes_that_do_not_fit(rank, sizes):
    x = torch.zeros(2)
    calls = (
        lambda: ag.all_gather(x, sizes=sizes),
        lambda: ag.reduce_scatter(x, sizes=sizes),
        lambda: ag.split(x, sizes=sizes),
        lambda: ag.gather(x, sizes=sizes),
        lambda: ag.scatter(x if rank == 0 else None, sizes=sizes),
        lambda: ag.all_to_all(x, send_sizes=sizes),
        lambda: ag.permute(x, [], sizes=sizes),
        lambda: ag.shift(x, sizes=sizes),
    )
    for call in calls:
        raises_everywhere(SizesError, call, "izes")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("sizes", [(1, 2), (1, 1, -1), "same"])
def test_receive_sizes_that_do_not_fit(sizes):
    x = torch.zeros(3)
    raises_everywhere(SizesError, lambda: ag.all_to_all(x, recv_sizes=sizes), "recv_sizes")


@pytest.mark.ranks(3)
def test_equal_sizes_that_do_not_divide(rank):
    x = torch.zeros(4)
    for call in (
        lambda: ag.reduce_scatter(x, sizes="equal"),
        lambda: ag.split(x, sizes="equal"),
        lambda: ag.all_to_all(x, send_sizes="equal"),
        lambda: ag.scatter(x if rank == 0 else None, sizes="equal"),
    ):
        raises_everywhere(SizesError, call, "4 does not divide by 3 ranks")


@pytest.mark.ranks(3)
def test_permutation_with_a_rank_twice(rank):
    x = torch.zeros(2)
    raises_everywhere(GroupError, lambda: ag.permute(x, [(0, 1), (0, 2)]), "rank 0 sends twice")
    raises_everywhere(GroupError, lambda: ag.permute(x, [(0, 1), (2, 1)]), "rank 1 receives twice")
    raises_everywhere(GroupError, lambda: ag.permute(x, [(0, 3)]), "to=3")
    raises_everywhere(InputError, lambda: ag.permute(x, [(0, 1, 2)]), "pair")
    raises_everywhere(InputError, lambda: ag.shift(x, 1.5), "offset=1.5")


@pytest.mark.ranks(3)
def test_no_tensor_off_src_only(rank):
    raises_everywhere(TensorError, lambda: ag.scatter(None, 1), "rank 1: no tensor", "None on src")
    x = torch.zeros(3) if rank == 0 else None
    raises_everywhere(TensorError, lambda: ag.scatter(x, int(rank == 1)), "<-")
    x = torch.zeros(3)
    raises_everywhere(
        PieceMismatch,
        lambda: ag.scatter(x, int(rank == 1)),
        "one src",
        "rank 1: root 1   <- 1, not 0",
    )


@pytest.mark.ranks(3)
def test_scatter_of_a_nest_needs_its_structure_everywhere(rank):
    x = [torch.zeros(3), torch.zeros(4)] if rank == 0 else None
    raises_everywhere(TensorError, lambda: ag.scatter(x), "rank 1: 0 tensors   <- passed none")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("everywhere", [True, False])
def test_tensors_that_cannot_travel(rank, everywhere):
    odd = everywhere or rank == 1
    kinds = {
        "sparse": torch.eye(3).to_sparse(),
        "a nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantised": torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
        "list, not a tensor": [1.0, 2.0],
        "NoneType, not a tensor": None,
    }
    for what, x in kinds.items():
        for call in (*EXCHANGING.values(), ag.reduce_scatter):
            given = x if odd else torch.eye(3)
            raises_everywhere(
                TensorError, lambda call=call, given=given: call(given), f"x is {what}", "rank 1:"
            )
        if everywhere:
            for call in (ag.all_reduce, ag.broadcast, ag.reduce, ag.scan, ag.share, ag.split):
                raises_everywhere(TensorError, lambda call=call, x=x: call(x), f"x is {what}")


@pytest.mark.ranks(1, 3)
def test_reductions_without_meaning(rank):
    z, b, i = torch.zeros(3, dtype=torch.complex64), torch.zeros(3).bool(), torch.zeros(3).int()
    for op in ("min", "max", "logsumexp"):
        raises_everywhere(ReductionError, lambda op=op: ag.all_reduce(z, op), "omplex", op)
    for op in ("mean", "logsumexp"):
        raises_everywhere(ReductionError, lambda op=op: ag.all_reduce(i, op), "whole number")
    for op in ("sum", "prod"):
        raises_everywhere(ReductionError, lambda op=op: ag.all_reduce(b, op), "bool")
    raises_everywhere(
        ReductionError, lambda: ag.scan(torch.zeros(3), "mean", exclusive=True), "mean of nothing"
    )


@pytest.mark.ranks(1, 2)
def test_unknown_gradient(rank):
    x = torch.zeros(3)
    both = (ag.all_reduce, ag.all_gather, ag.broadcast)
    for call in both:
        raises_everywhere(InputError, lambda call=call: call(x, grad="mean"), "grad='mean'")
    no_same = (ag.reduce_scatter, ag.all_to_all, ag.reduce, ag.gather, ag.scatter, ag.shift)
    for call in (
        *no_same,
        ag.scan,
        ag.share,
        ag.split,
        lambda x, grad: ag.permute(x, [], grad=grad),
    ):
        raises_everywhere(InputError, lambda call=call: call(x, grad="same"), "grad='same'")


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("value", ["yes", "", 1, 0, None, [], torch.tensor(True)])
def test_what_is_no_bool(rank, value):
    x = torch.zeros(3)
    for where in (contextlib.nullcontext(), ag.checked()):
        with where:
            for op in ("sum", "max"):
                raises_everywhere(
                    InputError,
                    lambda op=op: ag.scan(x, op, exclusive=value),
                    f"scan: exclusive={value!r} is neither True nor False.",
                )
            for sizes in (None, "equal"):
                raises_everywhere(
                    InputError,
                    lambda sizes=sizes: ag.shift(x, wrap=value, sizes=sizes),
                    f"shift: wrap={value!r} is neither True nor False.",
                )
            ag.shift(x, wrap=True, sizes="equal")  # 1 equals it, and its pair is kept


@pytest.mark.ranks(3)
def test_what_is_no_bool_on_one_rank_reaches_all_in_checked_mode(rank):
    with ag.checked():
        value = "yes" if rank == 1 else True
        raises_everywhere(
            InputError if rank == 1 else RankRaised,
            lambda: ag.scan(torch.zeros(3), exclusive=value),
            "scan: exclusive='yes' is neither True nor False.",
        )


def test_errors_without_a_world():
    x = torch.zeros(3, 2)
    raises_everywhere(InputError, lambda: ag.all_gather(x, 2), "dim=2")
    raises_everywhere(GroupError, lambda: ag.broadcast(x, 1), "src=1")
    raises_everywhere(SizesError, lambda: ag.all_gather(x, sizes=(2,)), "it holds 3")
    raises_everywhere(TensorError, lambda: ag.scatter(None), "None on src")
