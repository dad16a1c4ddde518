"""The message that ranks exchange before a call."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allgrad._wire.handshake import DTYPES, MAX_DIMS, OPERATIONS, ROW, Announcement, Brought
from allgrad.errors import AllgradError, SizesError

TENSORS = st.lists(
    st.builds(
        Brought,
        dtype=st.sampled_from([None, *DTYPES]),
        shape=st.lists(st.integers(0, 2**40), max_size=MAX_DIMS).map(tuple),
        dim=st.integers(0, MAX_DIMS - 1),
        amount=st.integers(0, 2**40),
    ),
    max_size=9,
).map(tuple)
WORD = st.integers(-(2**63), 2**63 - 1)


@given(op=st.sampled_from(OPERATIONS), tensors=TENSORS, names=WORD)
def test_a_message_comes_out_as_it_went_in(op, tensors, names):
    sent = Announcement(op, tensors, names)
    assert Announcement.decode(sent.encode()) == sent


@given(tensors=TENSORS.map(lambda ts: ts[:1]), text=st.text(max_size=900))
def test_a_problem_comes_with_as_much_of_its_text_as_fits(tensors, text):
    words = Announcement("sizes", tensors, problem=SizesError(text)).encode()
    assert len(words) == ROW
    got = Announcement.decode(words)
    assert got.tensors == tensors
    assert isinstance(got.problem, SizesError)
    assert text.startswith(str(got.problem))
    assert str(got.problem) == text or len(str(got.problem).encode()) > 400


@settings(max_examples=250)
@given(
    st.lists(st.one_of(st.just(1), st.integers(-2, 30), WORD), min_size=ROW - 2, max_size=ROW + 20)
)
def test_noise_gives_an_error_or_a_message_in_range(words):
    try:
        got = Announcement.decode(words)
    except AllgradError:
        return
    assert got.op in OPERATIONS
    assert all(n >= 0 for tensor in got.tensors for n in tensor.shape)


@settings(max_examples=250)
@given(place=st.integers(0, 20), value=st.one_of(st.integers(-3, 40), WORD))
def test_a_changed_word_gives_an_error_or_a_message_in_range(place, value):
    words = Announcement("all_gather", (Brought(torch.float32, (2, 3), 1, 5),) * 2, 7).encode()
    words[place] = value
    try:
        got = Announcement.decode(words)
    except AllgradError:
        return
    assert len(got.tensors) == 2
    assert all(n >= 0 for tensor in got.tensors for n in tensor.shape)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *((0, 2), (1, 99), (2, 3), (2, -1), (4, 5), (4, 99), (5, 7), (6, 800), (7, -2), (8, 25)),
        *((9, 24), (9, -1), (10, -1), (11, -1)),
    ],
)
def test_each_number_is_checked(word, value):
    words = Announcement("all_gather", (Brought(torch.float32, (2, 3), 0),)).encode()
    Announcement.decode(words)
    words[word] = value
    with pytest.raises(AllgradError):
        Announcement.decode(words)
