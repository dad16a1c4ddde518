"""One codec for every message between ranks: words of 64 bits behind one header.

    word  0    version of this layout, and version of allgrad
          1    kind of message: handshake, check, loss, pairs, state, host, join
          2 -  the fields of that kind

A ``Writer`` appends fields; a ``Reader`` takes them off in the same order and checks each against
its limits before it is used. Nothing received is ever unpickled or evaluated, and no message can
do more than raise an ``AllgradError`` (test_codec.py sends damaged ones).
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, TypeVar

import torch

from allgrad._core.version import __version__
from allgrad.errors import AllgradError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DTYPES", "HEADER_WORDS", "MAX_DIMS", "Reader", "Writer", "dtype_name", "kind_of"]

T = TypeVar("T")

LAYOUT = 5  # raise it whenever the fields of some kind change
KINDS = ("handshake", "check", "loss", "pairs", "state", "host", "join")
HEADER_WORDS = 2
MAX_DIMS = 24
_MAX_WORD = 2**63 - 1


def _existing(*names: str) -> tuple[torch.dtype, ...]:
    """The dtypes that this torch has; the order is part of the layout."""
    return tuple(getattr(torch, name, torch.float32) for name in names)


DTYPES: tuple[torch.dtype, ...] = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *_existing("uint64", "uint32", "uint16", "uint8", "bool"),
    *_existing("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *_existing("float8_e8m0fnu"),
)


def dtype_name(dtype: torch.dtype | None) -> str:
    """``float32`` instead of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _version_word(version: str) -> int:
    major, minor, patch = (int(n) for n in (*re.findall(r"\d+", version), "0", "0", "0")[:3])
    return LAYOUT << 48 | major << 32 | minor << 16 | patch


def _version_text(word: int) -> str:
    numbers = word >> 32 & 0xFFFF, word >> 16 & 0xFFFF, word & 0xFFFF
    return f"{'.'.join(map(str, numbers))} (messages of layout {word >> 48})"


_VERSION = _version_word(__version__)


def kind_of(words: Sequence[int]) -> str | None:
    """The kind of a message of this version; None for any other message, which a ``Reader`` refuses."""
    is_known = words[0] == _VERSION and 0 <= words[1] < len(KINDS)
    return KINDS[words[1]] if is_known else None


class Writer:
    """Appends the fields of one message."""

    __slots__ = ("words",)

    def __init__(self, kind: str) -> None:
        """Begin a message of this kind."""
        self.words = [_VERSION, KINDS.index(kind)]

    def number(self, *values: int) -> None:
        """Append whole numbers."""
        self.words += values

    def real(self, value: float) -> None:
        """Append a floating-point number, bit by bit."""
        self.words += struct.unpack("<q", struct.pack("<d", value))

    def choice(self, value: T, options: Sequence[T]) -> None:
        """Append the position of a value among options that every rank knows."""
        self.words.append(options.index(value))

    def dtype(self, dtype: torch.dtype | None) -> None:
        """Append a dtype, or none."""
        self.words.append(-1 if dtype is None else DTYPES.index(dtype))

    def text(self, text: str, most: int) -> None:
        """Append at most so many bytes of a text, no character cut in two, behind their number."""
        raw = text.encode(errors="replace")[:most].decode(errors="ignore").encode()
        padded = raw + b"\0" * (-len(raw) % 8)
        self.words.append(len(raw))
        self.words += struct.unpack(f"<{len(padded) // 8}q", padded)

    def padded(self, length: int) -> list[int]:
        """The message, filled with zeros to this many words."""
        assert len(self.words) <= length, f"{len(self.words)} words do not fit into {length}"
        return self.words + [0] * (length - len(self.words))


class Reader:
    """Takes the fields off a message in the order they were written, checking each."""

    __slots__ = ("_at", "_sender", "_words")

    def __init__(self, words: Sequence[int], kind: str, sender: int) -> None:
        """Read a message of this kind from rank ``sender``; raise if it speaks another version."""
        self._words, self._at, self._sender = words, 0, sender
        version = self.number(-_MAX_WORD - 1, _MAX_WORD)
        if version != _VERSION:
            raise AllgradError(
                f"Rank {sender} runs allgrad {_version_text(version)}, this rank "
                f"{_version_text(_VERSION)}.\n"
                "Install one version on every rank, and call the same collectives in the same order."
            )
        found = KINDS[self.number(0, len(KINDS) - 1)]
        if found != kind:
            raise AllgradError(
                f"Rank {sender} sent a message of another kind: {found}, not {kind}.\n"
                "Call the same collectives in the same order on every rank, checked on all or none."
            )

    def number(self, low: int = 0, high: int = _MAX_WORD) -> int:
        """Take a whole number between these limits, both included."""
        if self._at >= len(self._words):
            raise self.damaged()
        value = int(self._words[self._at])
        self._at += 1
        if not low <= value <= high:
            raise self.damaged()
        return value

    def numbers(self, count: int, low: int = 0, high: int = _MAX_WORD) -> tuple[int, ...]:
        """Take so many of them."""
        return tuple(self.number(low, high) for _ in range(count))

    def real(self) -> float:
        """Take a floating-point number."""
        bits = self.number(-_MAX_WORD - 1)
        value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
        return value

    def choice(self, options: Sequence[T]) -> T:
        """Take one of the options that every rank knows."""
        return options[self.number(0, len(options) - 1)]

    def dtype(self) -> torch.dtype | None:
        """Take a dtype, or none."""
        number = self.number(-1, len(DTYPES) - 1)
        return None if number < 0 else DTYPES[number]

    def shape(self) -> tuple[int, ...]:
        """Take a number of dimensions and as many lengths."""
        return self.numbers(self.number(0, MAX_DIMS))

    def text(self, most: int) -> str:
        """Take a text of at most so many bytes."""
        length = self.number(0, most)
        words = self.numbers(-(-length // 8), -_MAX_WORD - 1)
        raw = struct.pack(f"<{len(words)}q", *words)
        return raw[:length].decode("utf-8", errors="replace")

    def damaged(self) -> AllgradError:
        """The error for a field that is out of range, or missing."""
        return AllgradError(
            f"A message from rank {self._sender} is damaged: word {max(self._at - 1, 0)} is out of "
            "range, or missing."
        )
