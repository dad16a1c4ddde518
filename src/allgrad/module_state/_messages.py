"""Messages about the state of a rank: hash, specs, problem, settings, in the codec of ``_wire``."""

from __future__ import annotations

import json
import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from allgrad._wire.codec import HEADER_WORDS, Reader, Writer
from allgrad.errors import GroupError, InputError, TensorError
from allgrad.module_state._entries import is_numpy_number
from allgrad.module_state._specs import EntrySpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from allgrad.module_state._entries import Setting

__all__ = [
    "DIGEST_WORDS",
    "decode_digest",
    "decode_problem",
    "decode_settings",
    "decode_specs",
    "encode_digest",
    "encode_problem",
    "encode_settings",
    "encode_specs",
]

PROBLEMS: tuple[type[InputError], ...] = (InputError, TensorError, GroupError)
DIGEST_WORDS = HEADER_WORDS + 5
_MAX_TEXT = 2**20
_WIDTHS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}
_NUMPY_NAMES = ("bool", *(f"{kind}{bits}" for kind, widths in _WIDTHS.items() for bits in widths))
_NUMPY_TYPES = {name: np.dtype(name).type for name in _NUMPY_NAMES}


def encode_digest(text: str, problem: InputError | None) -> list[int]:
    """The hash of a text, or of the message of a problem, with the class of the problem."""
    hashed = text if problem is None else str(problem)
    digest = blake2b(hashed.encode(errors="replace"), digest_size=32).digest()
    message = Writer("state")
    message.choice(None if problem is None else _listed_class(problem), (None, *PROBLEMS))
    message.number(*struct.unpack("<4q", digest))
    return message.words


def decode_digest(words: Sequence[int], sender: int) -> type[InputError] | None:
    """The class of the sender's problem, if it has one. The hash is compared word by word."""
    return Reader(words, "state", sender).choice((None, *PROBLEMS))


def encode_problem(problem: InputError) -> list[int]:
    message = Writer("state")
    message.text(str(problem), _MAX_TEXT)
    return message.words


def decode_problem(words: Sequence[int], sender: int) -> str:
    return Reader(words, "state", sender).text(_MAX_TEXT)


def encode_specs(specs: Mapping[str, EntrySpec]) -> list[int]:
    message = Writer("state")
    message.number(len(specs))
    for name, spec in specs.items():
        for text in (name, *spec):
            message.text(text, _MAX_TEXT)
    return message.words


def decode_specs(words: Sequence[int], sender: int) -> dict[str, EntrySpec]:
    message = Reader(words, "state", sender)
    return {
        message.text(_MAX_TEXT): EntrySpec(*(message.text(_MAX_TEXT) for _ in EntrySpec._fields))
        for _ in range(message.number(0, len(words)))
    }


def encode_settings(values: Sequence[Setting]) -> list[int]:
    """Each setting as JSON, which holds integers of any length and any string exactly.

    A number of NumPy is ``{"float32": 0.5}``.
    """
    message = Writer("state")
    message.number(len(values))
    for value in values:
        text = json.dumps(_with_type(value) if is_numpy_number(value) else value)
        message.number(len(text))
        message.text(text, len(text))
    return message.words


def decode_settings(words: Sequence[int], sender: int, count: int) -> list[Setting]:
    """Exactly ``count`` settings: numbers, strings, None."""
    message = Reader(words, "state", sender)
    message.number(count, count)
    return [_decode_setting(message, 8 * len(words)) for _ in range(count)]


def _decode_setting(message: Reader, most: int) -> Setting:
    text = message.text(message.number(0, most))
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise message.damaged() from None
    if isinstance(value, dict):
        return _numpy_number(message, value)
    if value is not None and not isinstance(value, (int, float, str)):
        raise message.damaged()
    setting: Setting = value
    return setting


def _with_type(number: Any) -> dict[str, int | float]:
    return {number.dtype.name: number.item()}


def _numpy_number(message: Reader, typed: dict[str, Any]) -> np.generic:
    try:
        ((name, number),) = typed.items()
        made: np.generic = _NUMPY_TYPES[name](number)
        is_exact = isinstance(number, (int, float)) and json.dumps(made.item()) == json.dumps(
            number
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise message.damaged() from None
    if not is_exact:
        raise message.damaged()
    return made


def _listed_class(problem: InputError) -> type[InputError]:
    return type(problem) if type(problem) in PROBLEMS else InputError
