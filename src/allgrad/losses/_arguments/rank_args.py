"""The arguments of a loss on each rank, and the message of the handshake that carries them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from allgrad._core.dtensor import is_dtensor
from allgrad._wire.codec import DTYPES, Reader, Writer, dtype_name
from allgrad.losses._kind import LossKind

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FLOATING", "ROW_WORDS", "GradNeeds", "RankArgs", "TensorSpec", "grad_needs"]

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPTIONS_BYTES = 7  # of the digest of a call's options

_KINDS = tuple(LossKind)
_MAX_DIMS = 8  # dimensions of a shape that are sent; no argument may have more than three
_MAX_FEATURES, _MAX_SCALARS = 3, 2
_SPEC_WORDS = 3 + _MAX_DIMS + 1 + 2
# The rows of all losses have one length, so that ranks which call two of them can tell
# (test_ranks_that_call_two_kinds_of_losses).
ROW_WORDS = 5 + (_MAX_FEATURES + _MAX_SCALARS) * _SPEC_WORDS

Given: TypeAlias = Literal["tensor", "none", "other", "DTensor"]
_GIVEN: tuple[Given, ...] = ("tensor", "none", "other", "DTensor")
_DEVICES = ("", "cpu", "cuda", "meta", "xpu", "mps", "hpu")  # types; "" is any other


class GradNeeds(IntFlag):
    """Which gradients are needed, and whether grad mode is on at all."""

    KEYS = 1
    ANY = 2
    MODE = 4


def grad_needs(features: Sequence[object], scalars: Sequence[object]) -> GradNeeds:
    """The gradients that this rank needs; of the features, the first are the queries."""

    def any_needed(tensors: Sequence[object]) -> bool:
        return any(isinstance(x, Tensor) and x.requires_grad for x in tensors)

    if not torch.is_grad_enabled():
        return GradNeeds(0)
    needs = GradNeeds.MODE
    if any_needed(features[1:]):
        needs |= GradNeeds.KEYS | GradNeeds.ANY
    elif any_needed([*features[:1], *scalars]):
        needs |= GradNeeds.ANY
    return needs


class TensorSpec(NamedTuple):
    """One argument on one rank."""

    name: str
    given: Given
    dtype: torch.dtype | None = None  # None for a dtype that cannot be named in a message
    shape: tuple[int, ...] = ()
    value: float = 0.0  # of a scalar, 0 if reading it would wait for the device; sent if not finite
    device: tuple[str, int] = ("", -1)  # type and index

    @staticmethod
    def of(name: str, x: object, *, read: bool) -> TensorSpec:
        if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided:
            return TensorSpec(name, "none" if x is None else "other")
        if is_dtensor(x):
            return TensorSpec(name, "DTensor")
        dtype = x.dtype if x.dtype in DTYPES else None
        readable = read and x.numel() == 1 and dtype in FLOATING
        kind, index = x.device.type, x.device.index
        return TensorSpec(
            name,
            "tensor",
            dtype,
            tuple(x.shape),
            float(x.detach()) if readable else 0.0,
            (kind if kind in _DEVICES else "", -1 if index is None else index),
        )

    def write(self, message: Writer) -> None:
        message.choice(self.given, _GIVEN)
        message.dtype(self.dtype)
        message.number(len(self.shape[:_MAX_DIMS]), *self.shape[:_MAX_DIMS])
        # A number that is learned must not make each row another one (expected_calls).
        message.real(0.0 if math.isfinite(self.value) else self.value)
        message.choice(self.device[0], _DEVICES)
        message.number(self.device[1])

    @staticmethod
    def read(name: str, message: Reader) -> TensorSpec:
        return TensorSpec(
            name,
            message.choice(_GIVEN),
            message.dtype(),
            message.shape(),
            message.real(),
            (message.choice(_DEVICES), message.number(-1)),
        )

    @property
    def is_floating(self) -> bool:
        return self.given == "tensor" and self.dtype in FLOATING

    @property
    def vectors(self) -> int:
        """The number of vectors: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1]) if self.shape else 0

    def __str__(self) -> str:
        if self.given != "tensor":
            return f"{self.name} {self.kind}"
        return f"{self.name} {self.shape} {dtype_name(self.dtype) if self.dtype else 'other'}"

    @property
    def kind(self) -> str:
        """What it is instead of a tensor, for messages."""
        return {"none": "None", "DTensor": "a DTensor"}.get(self.given, "no dense tensor")

    @property
    def place(self) -> str:
        """The device, for messages."""
        kind, index = self.device
        return f"{kind or 'another device'}{f':{index}' if index >= 0 else ''}"


@dataclass(frozen=True, slots=True)
class RankArgs:
    """The arguments of one rank."""

    kind: LossKind
    options: int  # a digest of all other options
    needs: GradNeeds
    features: tuple[TensorSpec, ...]  # queries, keys, then further keys
    scalars: tuple[TensorSpec, ...]  # scale, then bias

    @property
    def pairs(self) -> int:
        return self.features[0].vectors

    @property
    def keys(self) -> int:
        return sum(spec.vectors for spec in self.features[1:])

    def encode(self) -> list[int]:
        message = Writer("pairs")
        message.choice(self.kind, _KINDS)
        message.number(self.options, self.needs)
        for spec in (*self.features, *self.scalars):
            spec.write(message)
        return message.padded(ROW_WORDS)

    def decode(self, words: Sequence[int], sender: int) -> RankArgs:
        """Read the message of any rank. Of another kind of loss only the first fields are read."""
        message = Reader(words, "pairs", sender)
        kind = message.choice(_KINDS)
        options = message.number(0, (1 << 8 * OPTIONS_BYTES) - 1)
        needs = GradNeeds(message.number(0, int(~GradNeeds(0))))
        if kind is not self.kind:
            return RankArgs(kind, options, needs, (), ())
        features = tuple(TensorSpec.read(spec.name, message) for spec in self.features)
        scalars = tuple(TensorSpec.read(spec.name, message) for spec in self.scalars)
        return RankArgs(kind, options, needs, features, scalars)

    def __str__(self) -> str:
        required, optional = self.features[:2], self.features[2:]
        shown = (*required, *(spec for spec in optional if spec.given != "none"))
        return ", ".join(map(str, shown)) or self.kind.value
