"""The message that ranks exchange before a call."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import allgrad as ag
from allgrad._core.partition import even
from allgrad._wire.handshake import DTYPES, MAX_DIMS, OPERATIONS, ROW, RankArgs, TensorSpec
from allgrad.errors import AllgradError, SizesError

TENSORS = st.lists(
    st.builds(
        TensorSpec,
        dtype=st.sampled_from([None, *DTYPES]),
        shape=st.lists(st.integers(0, 2**40), max_size=MAX_DIMS).map(tuple),
        dim=st.just(0),
    ),
    max_size=9,
).map(tuple)
WORD = st.integers(-(2**63), 2**63 - 1)


@given(
    op=st.sampled_from(OPERATIONS),
    tensors=TENSORS,
    names=WORD,
    amounts=st.one_of(st.none(), st.lists(st.integers(0, 2**40), max_size=9).map(tuple)),
)
def test_a_message_comes_out_as_it_went_in(op, tensors, names, amounts):
    sent = RankArgs(op, tensors, names, amounts=amounts, device="cuda")
    assert RankArgs.decode(sent.encode(), 1) == sent


@given(tensors=TENSORS.map(lambda ts: ts[:1]), text=st.text(max_size=900))
def test_a_problem_comes_with_as_much_of_its_text_as_fits(tensors, text):
    words = RankArgs("gather_sizes", tensors, problem=SizesError(text)).encode()
    assert len(words) == ROW
    got = RankArgs.decode(words, 1)
    assert got.tensors == tensors
    assert isinstance(got.problem, SizesError)
    assert text.startswith(str(got.problem))
    assert str(got.problem) == text or len(str(got.problem).encode()) > 400


@settings(max_examples=250)
@given(st.lists(st.one_of(st.just(1), st.integers(-2, 30), WORD), min_size=0, max_size=ROW + 20))
def test_noise_gives_an_error_or_a_message_in_range(words):
    try:
        got = RankArgs.decode(words, 1)
    except AllgradError:
        return
    assert got.operation in OPERATIONS
    assert all(n >= 0 for tensor in got.tensors for n in tensor.shape)


@settings(max_examples=250)
@given(place=st.integers(0, 20), value=st.one_of(st.integers(-3, 40), WORD))
def test_a_changed_word_gives_an_error_or_a_message_in_range(place, value):
    words = RankArgs("all_gather", (TensorSpec(torch.float32, (2, 3), 1),) * 2, 7).encode()
    words[place] = value
    try:
        got = RankArgs.decode(words, 1)
    except AllgradError:
        return
    assert all(n >= 0 for tensor in got.tensors for n in tensor.shape)


def sent():
    return RankArgs("all_gather", (TensorSpec(torch.float32, (2, 3), 0),)).encode()


# Words: version, kind, operation, length, tensors, names, root, error, amounts, device, then dtype, dim, ndim,
# shape.
@pytest.mark.parametrize(
    ("word", "value"),
    [
        *((0, 2), (1, 1), (1, 99), (2, 99), (3, -1), (4, -1), (4, 99), (6, -1), (7, 7), (7, -1)),
        *((8, -2), (8, 97), (9, -1), (9, 99), (10, -2), (10, 99), (11, 2), (11, -1), (12, 25)),
        *((12, -1), (13, -1)),
    ],
)
def test_each_number_is_checked(word, value):
    words = sent()
    RankArgs.decode(words, 1)
    words[word] = value
    with pytest.raises(AllgradError, match="ank 1"):
        RankArgs.decode(words, 1)


def test_another_version_is_named_beside_this_one():
    words = sent()
    words[0] += 1 << 16
    with pytest.raises(AllgradError, match=r"Rank 1 runs allgrad 0\.2\.0 .* this rank 0\.1\.0"):
        RankArgs.decode(words, 1)


def speak_another_version(rank, monkey_version):
    import allgrad as ag
    from allgrad._wire import codec

    if rank == 1:
        codec._VERSION = monkey_version
    with pytest.raises(AllgradError, match="runs allgrad"):
        ag.all_gather(torch.ones(rank + 1))


@pytest.mark.ranks(3)
def test_ranks_of_two_versions_raise_on_every_rank(rank):
    from allgrad._wire import codec, handshake

    own = codec._VERSION
    handshake._template.cache_clear()
    try:
        speak_another_version(rank, own + 1)
    finally:
        codec._VERSION = own
        handshake._template.cache_clear()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("leaves", [1, 40])
def test_amounts_that_fit_no_row_follow(rank, world, leaves):
    """40 tensors for 4 ranks: neither their shapes nor their amounts fit into one row."""
    xs = [torch.arange(float(world + i)) + 100 * rank for i in range(leaves)]
    ys, sizes = ag.all_to_all(xs, return_sizes=True)
    for i, (y, received) in enumerate(zip(ys, sizes, strict=True)):
        cut = even(world + i, world)
        assert received == (cut[rank],) * world
        first = sum(cut[:rank])
        assert y.tolist() == [100 * r + first + n for r in range(world) for n in range(cut[rank])]
    pieces = ag.scatter(xs if rank == 2 else [x[:0] for x in xs], 2)
    for i, piece in enumerate(pieces):
        assert torch.equal(piece, (torch.arange(float(world + i)) + 200).tensor_split(4)[rank])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("odd", ["all_to_all", "scatter", "shift", "reduce_scatter"])
def test_a_mistake_on_one_rank_reaches_ranks_in_other_calls(rank, odd):
    x = torch.ones(3)
    with pytest.raises(AllgradError):
        getattr(ag, odd)(x) if rank == 1 else ag.all_gather(x)
    with pytest.raises(AllgradError, match="sparse"):
        getattr(ag, odd)(x.to_sparse() if rank == 1 else x)
    assert ag.all_gather(x).shape == (9,)
