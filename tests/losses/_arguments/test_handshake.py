"""A mistake of one rank raises on every rank, with the same table; the group stays usable."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import allgrad as ag
from allgrad.errors import InputError, PieceMismatch, RankRaised, SizesError, TensorError
from allgrad.losses import (
    KeyQueue,
    clip_loss,
    cross_entropy,
    info_nce_loss,
    siglip_loss,
    supcon_loss,
)
from refusals import raises_everywhere

GOOD = torch.ones(2, 4)

# What rank 1 passes instead of image, text and scale; the error; part of its message.
MISTAKES = {
    "other width": ((GOOD, torch.ones(2, 5), 1.0), PieceMismatch, "the same width"),
    "both of other width": ((torch.ones(2, 5),) * 2 + (1.0,), PieceMismatch, "the same width"),
    "counts differ": ((GOOD, torch.ones(3, 4), 1.0), PieceMismatch, "2 and 3"),
    "nan": ((GOOD, GOOD, float("nan")), InputError, "scale is nan"),
    "beyond all floats": ((GOOD, GOOD, 10**400), InputError, "scale is inf"),
    "infinite": ((GOOD, GOOD, torch.tensor(float("inf"))), InputError, "scale is inf"),
    "scale of two": ((GOOD, GOOD, torch.ones(2)), InputError, r"scale has shape \(2,\)"),
    "integer scale": ((GOOD, GOOD, torch.tensor(3)), InputError, "not a floating-point number"),
    "no scale": ((GOOD, GOOD, None), InputError, "scale is missing"),
    "integers": ((GOOD.long(), GOOD.long(), 1.0), TensorError, "image is not floating-point"),
    "list": ((GOOD.tolist(), GOOD, 1.0), TensorError, "image is no dense tensor"),
    "array": ((GOOD, GOOD.numpy(), 1.0), TensorError, "text is no dense tensor"),
    "no features": ((None, GOOD, 1.0), TensorError, "image is None"),
    "vector": ((GOOD[0], GOOD, 1.0), TensorError, "image has 1 dimensions"),
    "six dims": ((GOOD, torch.ones(1, 1, 1, 1, 2, 4), 1.0), TensorError, "text has 6 dimensions"),
    "other dtype": ((GOOD.double(), GOOD.double(), 1.0), PieceMismatch, "the same dtype"),
    "mixed dtypes": ((GOOD, GOOD.half(), 1.0), PieceMismatch, "another dtype of text"),
}


@pytest.mark.ranks(3)
def test_mistake_of_one_rank_raises_on_all(rank, world):
    for loss in (clip_loss, siglip_loss, info_nce_loss):
        for mistake, kind, says in MISTAKES.values():
            if loss is info_nce_loss:
                text = says.replace("image", "query").replace("text", "key")
            else:
                text = says
            given = mistake if rank == 1 else (GOOD, GOOD, 1.0)
            with pytest.raises(kind, match=text) as raised:
                loss(*given)
            assert " rank 1: " in str(raised.value)
            assert str(raised.value).count("<-") == 1
            assert str(raised.value).startswith(loss.__name__)
    assert ag.all_reduce(torch.ones(1)).item() == world


# The same for arguments that only one of the losses has.
MORE_MISTAKES = {
    "nan bias": (siglip_loss, float("nan"), InputError, "bias is nan"),
    "infinite bias": (siglip_loss, torch.tensor(float("-inf")), InputError, "bias is -inf"),
    "bias of two": (siglip_loss, torch.zeros(2), InputError, r"bias has shape \(2,\)"),
    "integer bias": (siglip_loss, torch.tensor(1), InputError, "bias is not a floating-point"),
    "wide negatives": (info_nce_loss, torch.ones(3, 5), PieceMismatch, "width of hard_negatives"),
    "integer negatives": (
        info_nce_loss,
        torch.ones(3, 4).long(),
        TensorError,
        "hard_negatives is not",
    ),
    "negatives in 4 dims": (info_nce_loss, torch.ones(1, 1, 3, 4), TensorError, "has 4 dimensions"),
    "double negatives": (
        info_nce_loss,
        torch.ones(3, 4).double(),
        PieceMismatch,
        "of hard_negatives",
    ),
}


@pytest.mark.ranks(3)
def test_mistake_in_a_bias_or_in_negatives_raises_on_all(rank, world):
    good = {siglip_loss: 0.5, info_nce_loss: torch.ones(3, 4)}
    for loss, mistake, kind, says in MORE_MISTAKES.values():
        with pytest.raises(kind, match=says) as raised:
            loss(GOOD, GOOD, 1.0, mistake if rank == 2 else good[loss])
        (odd,) = [line for line in str(raised.value).splitlines() if "<-" in line]
        assert odd.startswith("  rank 2: ")
    assert ag.all_reduce(torch.ones(1)).item() == world


@pytest.mark.ranks(3)
def test_a_bias_on_some_ranks_only_raises_on_all(rank, world):
    with pytest.raises(InputError, match="must give a bias, or none"):
        siglip_loss(GOOD, GOOD, 1.0, None if rank == 1 else 0.5)


@pytest.mark.ranks(3)
def test_options_must_agree(rank, world):
    for options, shown in (
        ({"grad_reduction": "sum"}, "grad_reduction='sum'"),
        ({"label_smoothing": 0.1}, "label_smoothing=0.1"),
        ({"ring": True}, "ring=True"),
        ({"budget": 1}, "budget=1"),
    ):
        call = partial(clip_loss, GOOD, GOOD, 1.0, **(options if rank == 2 else {}))
        raises_everywhere(InputError, call, shown, "<- other options", "ring=None")
    smoothing = (0, 0.0, torch.tensor([0.0]))[rank]  # one value
    clip_loss(GOOD, GOOD, 1.0, label_smoothing=smoothing)


@pytest.mark.ranks(3)
def test_different_losses_raise_on_all(rank, world):
    """Messages have one length for all losses, so that the ranks can compare them."""
    with pytest.raises(InputError, match=r"rank 2: .*<- another loss") as raised:
        (siglip_loss if rank == 2 else clip_loss)(GOOD, GOOD, 1.0)
    assert str(raised.value).count("<-") == 1
    assert ag.all_reduce(torch.ones(1)).item() == world


@pytest.mark.ranks(3)
def test_ranks_that_call_two_kinds_of_losses(rank, world):
    """Their rows have other fields and one length: in a first call, and where ranks expect a call."""
    ids, queue = torch.arange(len(GOOD)), KeyQueue(8, GOOD.shape[1])
    pairs = partial(clip_loss, GOOD, GOOD, 1.0)
    others = (
        partial(supcon_loss, GOOD, GOOD, 1.0, ids, ids),
        partial(queue.push, GOOD),
        partial(cross_entropy, GOOD, GOOD, ids),
    )
    for other in others:
        for usual, odd in ((pairs, other), (other, pairs)):
            for expected in (0, 4):
                for _ in range(expected):
                    usual()
                call = odd if rank == 2 else usual
                raises_everywhere(PieceMismatch, call, "rank 2: ", "<- another loss", "clip_loss: ")
                assert ag.all_reduce(torch.ones(1)).item() == world


@pytest.mark.ranks(3)
def test_unknown_options(rank, world):
    with pytest.raises(InputError, match="no grad_reduction='avg'"):
        clip_loss(GOOD, GOOD, 1.0, grad_reduction="avg")
    with pytest.raises(InputError, match="label_smoothing=2"):
        info_nce_loss(GOOD, GOOD, 1.0, label_smoothing=2)
    for options in (
        {"grad_reduction": ["mean"]},
        {"label_smoothing": None},
        {"label_smoothing": "x"},
        {"label_smoothing": torch.tensor([0.1, 0.2])},
        {"label_smoothing": torch.tensor(0.1, device="meta")},
        {"budget": "x"},
        {"budget": float("nan")},
        {"budget": -1},
        {"ring": "x"},
        {"ring": 2},
    ):
        with pytest.raises(InputError, match=next(iter(options))):
            clip_loss(GOOD, GOOD, 1.0, **options)


@pytest.mark.ranks(3)
def test_several_numbers_as_an_option_of_one_rank_raise_on_all(rank, world):
    smoothing = torch.tensor([0.1, 0.2]) if rank == 1 else 0.1
    call = partial(clip_loss, GOOD, GOOD, 1.0, label_smoothing=smoothing)
    raises_everywhere(InputError, call, "rank 1: ", "tensor([0.1000, 0.2000])", "<- other options")


@pytest.mark.ranks(3)
def test_a_dtensor_is_refused_on_every_rank(rank, world):
    """Of a scale under FSDP2 most ranks hold nothing; of features each holds its rows, and shows those of all."""
    mesh = init_device_mesh("cpu", (world,))
    scale = distribute_tensor(torch.tensor([2.0]), mesh, [Shard(0)])
    whole = distribute_tensor(torch.tensor([2.0]), mesh, [Replicate()])
    rows = distribute_tensor(torch.ones(world * 2, 4), mesh, [Shard(0)])
    ids = torch.arange(2)
    for number in (scale, whole):
        for sizes in (None, "equal"):
            call = partial(clip_loss, GOOD, GOOD, number, sizes=sizes)
            raises_everywhere(InputError, call, "scale is a DTensor" if sizes is None else "scale")
        call = partial(supcon_loss, GOOD, GOOD, number, ids, ids)
        raises_everywhere(TensorError, call, "scale is a DTensor", "full_tensor()")
    for x in (rows, rows if rank == 1 else GOOD):
        call = partial(clip_loss, GOOD, x, 1.0)
        raises_everywhere(TensorError, call, "text is a DTensor", "rank 1: ", "to_local()")
        call = partial(supcon_loss, GOOD, x, 1.0, ids, ids)
        raises_everywhere(TensorError, call, "key is a DTensor", "rank 1: ", "to_local()")
    call = partial(cross_entropy, torch.ones(3, 4), rows, torch.zeros(3, dtype=torch.int64))
    raises_everywhere(TensorError, call, "weight is a DTensor")
    clip_loss(GOOD, rows.to_local(), scale.full_tensor())


@pytest.mark.ranks(2)
def test_an_option_of_another_type_is_no_repeated_call(rank, world):
    clip_loss(GOOD, GOOD, 1.0, ring=True, sizes="equal")
    with pytest.raises(InputError, match="ring=1"):
        clip_loss(GOOD, GOOD, 1.0, ring=1, sizes="equal")


@pytest.mark.ranks(2)
def test_no_pair_anywhere(rank, world):
    with pytest.raises(InputError, match="no rank has a pair"):
        clip_loss(GOOD[:0], GOOD[:0], 1.0)


@pytest.mark.ranks(3)
def test_sizes_that_do_not_fit(rank, world):
    with pytest.raises(SizesError, match="say that rank"):
        clip_loss(GOOD, GOOD, 1.0, sizes=(3, 3, 3))
    with pytest.raises(SizesError, match="sizes='even'"):
        clip_loss(GOOD, GOOD, 1.0, sizes="even")
    with pytest.raises(SizesError, match="2 entries for a group of 3 ranks"):
        clip_loss(GOOD, GOOD, 1.0, sizes=(2, 2))
    for bad in ((2, 2, 2.5), (2, 2, -2)):
        with pytest.raises(SizesError, match="whole numbers"):
            clip_loss(GOOD, GOOD, 1.0, sizes=bad)


def test_mistake_of_a_single_process_raises():
    with pytest.raises(PieceMismatch, match="the same number of rows"):
        clip_loss(GOOD, GOOD[:1], 1.0)
    with pytest.raises(PieceMismatch, match="the same width"):
        info_nce_loss(GOOD, GOOD, 1.0, torch.ones(3, 5))
    with pytest.raises(InputError, match="bias is nan"):
        siglip_loss(GOOD, GOOD, 1.0, float("nan"))


# What rank 1 passes beside good features, where sizes are given and nothing is exchanged.
LONELY_MISTAKES = {
    "sizes of other batches": {"sizes": (2, 3, 2)},
    "sizes of fewer ranks": {"sizes": (2, 2)},
    "another scale": {"scale": torch.ones(2)},
    "an unknown reduction": {"grad_reduction": "avg"},
}


@pytest.mark.ranks(3)
def test_in_checked_mode_a_mistake_beside_sizes_raises_on_all(rank, world):
    for loss in (clip_loss, siglip_loss, info_nce_loss):
        for mistake in LONELY_MISTAKES.values():
            given = {"scale": 1.0, "sizes": (2, 2, 2), **(mistake if rank == 1 else {})}
            kind, says = (InputError, loss.__name__) if rank == 1 else (RankRaised, "rank 1 ended")
            with ag.checked(), pytest.raises(kind, match=says):
                loss(GOOD, GOOD, **given)
    assert ag.all_reduce(torch.ones(1)).item() == world
