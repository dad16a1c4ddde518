"""Messages about a state: decoded to what was encoded, or refused."""

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


@pytest.mark.parametrize("text", ["", "{", "[1]", "nul", "[" * 10**5, "9" * 10**5])
def test_settings_that_are_no_number_string_or_none_are_refused(text):
    message = Writer("state")
    message.number(1, len(text))
    message.text(text, len(text))
    with pytest.raises(AllgradError, match="message from rank 2 is damaged"):
        messages.decode_settings(message.words, 2, 1)


def test_another_number_of_settings_is_refused():
    with pytest.raises(AllgradError, match="damaged"):
        messages.decode_settings(messages.encode_settings([1, 2]), 1, 3)
