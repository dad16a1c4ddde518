"""Messages about a state: decoded to what was encoded, or refused."""

import numpy as np
import pytest

from allgrad._wire.codec import Writer
from allgrad.errors import AllgradError, GroupError, InputError, SizesError
from allgrad.module_state import _messages as messages
from allgrad.module_state._specs import EntrySpec


def test_specs_are_decoded_exactly():
    specs = {
        "a.ä": EntrySpec("parameter", "float32", "(2, 8)", value="#0"),
        "": EntrySpec("object"),
    }
    assert messages.decode_specs(messages.encode_specs(specs), 1) == specs


@pytest.mark.parametrize("problem", [InputError("a\nb"), GroupError("c"), SizesError("d")])
def test_a_problem_has_its_class_and_its_text(problem):
    found = messages.decode_digest(messages.encode_digest("", problem), 1)
    assert found is (type(problem) if type(problem) in messages.PROBLEMS else InputError)
    assert messages.decode_problem(messages.encode_problem(problem), 1) == str(problem)
    assert messages.decode_digest(messages.encode_digest("", None), 1) is None


def test_numbers_of_numpy_are_decoded_exactly_in_their_type():
    every = [np.dtype(code).type for code in "?bhilqBHILQefd"]
    values = [kind(1) for kind in every] + [np.float32(0.1), np.float16("inf"), np.float64("nan")]
    found = messages.decode_settings(messages.encode_settings(values), 1, len(values))
    assert [value.dtype for value in found] == [value.dtype for value in values]
    assert np.array_equal(found, values, equal_nan=True)


UNKNOWN_NUMBERS = [
    "{}", '{"int8": 1, "int16": 1}', '{"object": 1}', '{"int8": 300}', '{"float32": 0.1}',
    '{"float64": "1"}', '{"float64": null}', '{"int8": [1]}', '{"bool": 2}',
]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "nul", "[" * 10**5, "9" * 10**5, *UNKNOWN_NUMBERS]
)
def test_settings_that_are_no_number_string_or_none_are_refused(text):
    message = Writer("state")
    message.number(1, len(text))
    message.text(text, len(text))
    with pytest.raises(AllgradError, match="message from rank 2 is damaged"):
        messages.decode_settings(message.words, 2, 1)


def test_another_number_of_settings_is_refused():
    with pytest.raises(AllgradError, match="damaged"):
        messages.decode_settings(messages.encode_settings([1, 2]), 1, 3)
