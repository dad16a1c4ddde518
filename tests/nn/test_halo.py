"""Halos and convolutions: padding and convolution of the joined tensor."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from allgrad.errors import InputError, PieceMismatch, SizesError
from allgrad.nn import HaloConv1d, HaloConv2d, HaloConv3d, halo_exchange
from counting import Counted
from exactness import leaf, loss, place, random
from nn.twins import LENGTHS, assign, check_twin, close, derivatives, each, pieces_of
from places import everywhere, on
from refusals import raises_everywhere

HALO = {1: HaloConv1d, 2: HaloConv2d, 3: HaloConv3d}
PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def windows(joined, dim, edges, wrap, lengths):
    """Each rank's window of the padded tensor, in one process."""
    before, after = edges
    x = joined.movedim(dim, -1)
    n = x.shape[-1]
    if wrap and n:
        x = x[..., torch.arange(-before, n + after) % n]
    else:
        x = pad(x, (before, after))
    starts = [sum(lengths[:r]) for r in range(len(lengths))]
    return [
        x[..., start : start + (size + before + after if size else 0)].movedim(-1, dim)
        for start, size in zip(starts, lengths, strict=True)
    ]


def exchange(group, kind, edges, wrap, dim):
    _, world = place(group)
    lengths = LENGTHS[kind][:world]
    shape = [2, 3, 2]
    shape[dim] = 0
    inputs = [(x,) for x in pieces_of(world, kind, shape, dim)]

    def whole(everyone, _):
        return windows(torch.cat([xs[0] for xs in everyone], dim), dim, edges, wrap, lengths)

    def run(xs, _):
        return halo_exchange(xs[0], dim, *edges, wrap, group=group)

    check_twin(run, whole, inputs, group=group)


@pytest.mark.one_in(4)
@everywhere
def test_halo_everywhere(where):
    cases = [
        ("equal", (2, 3), True, 1),
        ("equal", (3, 1), False, 2),
        ("ragged", (1, 1), True, 1),
        ("empty", (1, 2), True, 1),
        ("empty", (2, 0), False, 2),
    ]
    on(where, each, exchange, cases)


@pytest.mark.ranks(3)
def test_one_message_each_way(rank, world):
    x = leaf(random((LENGTHS["ragged"][rank], 2), rank))
    with Counted() as calls:
        halo_exchange(x, 0, 1, 1, sizes=LENGTHS["ragged"][:world]).sum().backward()
    assert calls == ["all_to_all"] * 2


@pytest.mark.ranks(3)
def test_nobody_holds_anything(rank, world):
    x = leaf(torch.zeros(0, 2))
    y = halo_exchange(x, 0, 1, 1, wrap=True)
    assert y.shape == (0, 2)
    y.sum().backward()


@pytest.mark.ranks(3)
def test_halo_longer_than_a_piece(rank, world):
    x = torch.zeros(LENGTHS["ragged"][rank], 2)
    raises_everywhere(
        SizesError, lambda: halo_exchange(x, 0, 2, 0), "a halo of 2 before", "rank 1", "<- gives 2"
    )
    # The last rank gives nothing to a rank behind, so its piece may be shorter.
    long = torch.zeros((3, 3, 1)[rank], 2)
    assert halo_exchange(long, 0, 3, 0).shape[0] == 3 + len(long)
    raises_everywhere(
        SizesError, lambda: halo_exchange(long, 0, 3, 0, True), "rank 2", "<- gives 3"
    )


@pytest.mark.ranks(3)
def test_bad_arguments(rank, world):
    x = torch.zeros(3, 2)
    raises_everywhere(InputError, lambda: halo_exchange(x, 2, 1, 1), "dim=2", "-2 to 1")
    raises_everywhere(InputError, lambda: halo_exchange(x, 0, -1, 1), "before=-1")
    # What one rank alone gets wrong raises on every rank too.
    for arguments in ((2, 1, 1), (0, -1, 1)):
        mine = arguments if rank == 1 else (0, 1, 1)
        raises_everywhere(InputError, lambda mine=mine: halo_exchange(x, *mine), "<-")
    raises_everywhere(PieceMismatch, lambda: halo_exchange(x, 0, 1 + rank // 2, 1), "before=2")
    raises_everywhere(SizesError, lambda: halo_exchange(x, 0, 1, 1, sizes=[3, 3]), "sizes=[3, 3]")
    odd = torch.zeros(3, 4) if rank == 1 else x
    raises_everywhere(PieceMismatch, lambda: halo_exchange(odd, 0, 1, 1), "(3, 4)", "<- differs")


@pytest.mark.ranks(3)
def test_arguments_that_are_no_whole_numbers(rank, world):
    x, held = torch.zeros(3, 2), [3] * world
    for wrong in (True, 1.0, 1.5, None, "1", 2**70):
        seen = repr(wrong) if rank == 1 else "?"  # numbers alone travel
        for at, name in enumerate(("dim", "before", "after")):
            arguments = [1, 1, 1]
            if rank == 1:
                arguments[at] = wrong
            mark = "<- no whole number" if at else "<- no dim from -2 to 1"
            raises_everywhere(
                InputError, lambda a=arguments: halo_exchange(x, *a), f"{name}={seen}", mark
            )
        raises_everywhere(
            InputError, lambda w=wrong: halo_exchange(x, 0, w, 1), f"before={wrong!r}"
        )
        raises_everywhere(
            InputError, lambda w=wrong: halo_exchange(x, 0, 1, w, sizes=held), f"after={wrong!r}"
        )


@pytest.mark.ranks(3)
def test_a_wrap_that_is_neither_true_nor_false(rank, world):
    x = torch.zeros(3, 2)
    wrap = np.array([True, False]) if rank == 1 else True
    mark = "neither wrapped nor not"
    raises_everywhere(InputError, lambda: halo_exchange(x, 0, 1, 1, wrap), "wrap=?", mark)
    assert halo_exchange(x, 0, torch.tensor(1), 1, 1).shape == (5, 2)


@pytest.mark.ranks(3)
def test_numbers_of_numpy(rank, world):
    x = random((3, 2), rank)
    wanted = halo_exchange(x, 0, 1, 2)
    one = np.int64(1) if rank == 1 else 1
    for sizes in (None, [3] * world):
        got = halo_exchange(x, np.int32(0), one, np.int16(2), np.bool_(False), sizes=sizes)
        assert got.shape == (6, 2)
        assert torch.equal(got, wanted)
        wrapped = halo_exchange(x, 0, one, np.uint8(2), np.bool_(True), sizes=sizes)
        assert torch.equal(wrapped, halo_exchange(x, 0, 1, 2, True))


def convolve(group, kind, dims, dim, options):
    _, world = place(group)
    lengths = LENGTHS[kind][:world]
    torch.manual_seed(1)
    plain = PLAIN[dims](2, 4, **options).double()
    ours = HALO[dims].from_plain(plain, dim=dim, group=group)
    names = [name for name, _ in plain.named_parameters()]
    shape = [2, 2, *[4] * dims]
    shape[dim] = 0
    inputs = [(x,) for x in pieces_of(world, kind, shape, dim)]
    step = ours.stride[dim]
    ends = [-(-sum(lengths[: r + 1]) // step) for r in range(world)]
    outputs = [b - a for a, b in zip([0, *ends], ends, strict=False)]

    def whole(everyone, ps):
        joined = torch.cat([xs[0] for xs in everyone], dim)
        return assign(plain, names, ps)(joined).split(outputs, dim)

    check_twin(
        lambda xs, ps: assign(ours, names, ps)(*xs),
        whole,
        inputs,
        list(plain.parameters()),
        group=group,
    )
    assert ours.to_plain().weight is plain.weight
    assert repr(ours.to_plain()) == repr(plain)


@pytest.mark.one_in(7)
@everywhere
def test_conv_everywhere(where):
    cases = [
        ("empty", 1, -1, {"kernel_size": 3, "padding": 1}),
        ("equal", 1, -1, {"kernel_size": 4, "padding": "same"}),
    ]
    on(where, each, convolve, cases)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("dims", "dim", "options"),
    [
        (2, -1, {"kernel_size": 3, "padding": 1, "stride": 2, "bias": False}),
        (2, -2, {"kernel_size": (3, 2), "padding": (1, 0), "groups": 2}),
        (2, -2, {"kernel_size": (3, 2), "padding": "same"}),
        (3, -2, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}),
        (1, -1, {"kernel_size": 1, "stride": 3}),
    ],
    ids=str,
)
def test_conv_with_every_option(dims, dim, options):
    on("3 ranks", convolve, "empty", dims, dim, options)
    on("2 ranks", convolve, "ragged", dims, dim, options)


def test_dilated_conv():
    on("3 ranks", convolve, "equal", 1, -1, {"kernel_size": 3, "dilation": 2, "padding": 2})


@pytest.mark.ranks(3)
def test_batches_of_torch_vmap(rank, world):
    """The ranks tell each other their sizes, once for the whole batch."""
    rows = (2, 0, 3)[rank]
    x = random((4, rows, 2), rank)
    conv = HaloConv1d(2, 2, 3, padding=1).double()
    for layer in (lambda x: halo_exchange(x, 0, 1, 1), lambda x: conv(x.T[None])):
        want = torch.stack([layer(one) for one in x])
        close(torch.func.vmap(layer)(x), want, "the batch")
        with Counted() as calls:
            torch.func.vmap(layer)(x)
        assert len(calls) < 6


@pytest.mark.ranks(2)
def test_compiled_without_graph_breaks(rank, world):
    torch.manual_seed(1)
    plain = nn.Conv1d(2, 3, 3, padding=1).double()
    ours = HaloConv1d.from_plain(plain)
    sizes = LENGTHS["ragged"][:world]
    everyone = [leaf(x) for x in pieces_of(world, "ragged", (2, 2, 0), 2)]
    z = leaf(everyone[rank])
    y = torch.compile(lambda x: ours(x, sizes=sizes), fullgraph=True, backend="aot_eager")(z)
    wanted = plain(torch.cat(everyone, 2)).split(sizes, 2)
    close(y, wanted[rank], "the output")
    want = derivatives(sum(loss(w, r) for r, w in enumerate(wanted)), everyone)
    close(derivatives(loss(y, rank), [z])[0], want[rank], "the gradient")


@pytest.mark.ranks(2)
def test_conv_that_does_not_fit(rank, world):
    raises_everywhere(InputError, lambda: HaloConv1d(2, 2, 3), "padding=(0,)", "spans 3")
    raises_everywhere(
        InputError, lambda: HaloConv2d(2, 2, 3, padding=1, dim=1), "dim=1", "-2 to -1"
    )
    raises_everywhere(
        InputError,
        lambda: HaloConv1d(2, 2, 3, padding=1, padding_mode="reflect"),
        "padding_mode='reflect'",
    )
