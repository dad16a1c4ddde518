"""The message that ranks exchange before a call."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allgrad.agreement import MAX_DIMS, OPERATIONS, Announcement
from allgrad.errors import AllgradError, SizesError

SHAPES = st.lists(st.integers(0, 2**40), max_size=MAX_DIMS).map(tuple)


@given(
    op=st.sampled_from(OPERATIONS),
    dtype=st.sampled_from([None, torch.float32, torch.bool, torch.complex64]),
    shape=SHAPES,
    dim=st.integers(-5, 5),
    count=st.integers(0, 2**40),
    text=st.text(max_size=900),
)
def test_a_message_comes_out_as_it_went_in(op, dtype, shape, dim, count, text):
    sent = Announcement(op, dtype, shape, dim, problem=SizesError(text))
    got = Announcement.decode(sent.encode(count))
    assert (got.op, got.dtype, got.shape, got.dim, got.count) == (op, dtype, shape, dim, count)
    assert isinstance(got.problem, SizesError)
    assert text.startswith(str(got.problem))
    assert str(got.problem) == text or len(text.encode()) > 500


WORD = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=500)
@given(st.lists(st.one_of(st.integers(-2, 30), WORD), min_size=90, max_size=100))
def test_noise_gives_an_error_or_a_message_in_range(words):
    try:
        got = Announcement.decode(words)
    except AllgradError:
        return
    assert got.op in OPERATIONS
    assert all(length >= 0 for length in got.shape)


@pytest.mark.parametrize(
    ("word", "value"), [(0, 2), (1, 99), (2, -2), (3, 25), (5, -1), (6, 7), (7, 513), (8, -1)]
)
def test_each_number_is_checked(word, value):
    words = Announcement("all_gather", torch.float32, (2, 3), 0).encode(0)
    Announcement.decode(words)
    words[word] = value
    with pytest.raises(AllgradError):
        Announcement.decode(words)
