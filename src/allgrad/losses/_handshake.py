"""What the ranks tell each other before a loss: one small message, so that a mistake raises everywhere.

Every rank tells the facts of its arguments, hears everyone's, and holds them against the same
rules. What one rank got wrong is thus raised on all of them, with the same table.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from allgrad._wire import primitives as wire
from allgrad.collectives._sizes import given_sizes
from allgrad.collectives.all_gather import all_gather
from allgrad.errors import InputError, PieceMismatch, SizesError, TensorError, rank_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from allgrad._wire.primitives import GroupLike
    from allgrad.types import Sizes

__all__ = ["Meeting", "meet"]

_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
_FLOATING = _DTYPES[:4]
_NOTHING, _NO_TENSOR, _OTHER_DTYPE = -3, -2, -1
_DIMS = 8  # of a shape that are told


class Fact(NamedTuple):
    """One argument on one rank."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    value: float  # of a number; 0 for features, and where reading it would wait for the device

    @staticmethod
    def of(name: str, x: object, *, read: bool) -> Fact:
        if x is None:
            return Fact(name, _NOTHING, (), 0.0)
        if not isinstance(x, Tensor):
            return Fact(name, _NO_TENSOR, (), 0.0)
        dtype = _DTYPES.index(x.dtype) if x.dtype in _DTYPES else _OTHER_DTYPE
        readable = read and x.numel() == 1 and dtype >= 0 and not x.is_complex()
        return Fact(name, dtype, tuple(x.shape), float(x.detach()) if readable else 0.0)

    def words(self) -> list[int]:
        bits: int = struct.unpack("<q", struct.pack("<d", self.value))[0]
        shape = [*self.shape, *[0] * _DIMS][:_DIMS]
        return [self.dtype, len(self.shape), *shape, bits]

    @staticmethod
    def read(name: str, words: Sequence[int]) -> Fact:
        dtype, dims, *shape, bits = words
        value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
        return Fact(name, dtype, tuple(shape[: min(dims, _DIMS)]), value)

    @property
    def vectors(self) -> int:
        """How many vectors: all but the last dimension."""
        return math.prod(self.shape[:-1]) if self.shape else 0

    def __str__(self) -> str:
        if self.dtype in {_NOTHING, _NO_TENSOR}:
            return f"{self.name} {'None' if self.dtype == _NOTHING else 'no tensor'}"
        dtype = "other" if self.dtype == _OTHER_DTYPE else str(_DTYPES[self.dtype])
        return f"{self.name} {self.shape} {dtype.removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Told:
    """All that one rank tells."""

    features: tuple[Fact, ...]  # the two towers, then what else has columns
    numbers: tuple[Fact, ...]
    options: int
    wants: int

    def words(self) -> list[int]:
        facts = [word for fact in (*self.features, *self.numbers) for word in fact.words()]
        return [self.options, self.wants, *facts]

    def read(self, words: Sequence[int]) -> Told:
        """What another rank tells, whose arguments have the same names."""
        options, wants, *rest = words
        length = _DIMS + 3
        named = [*self.features, *self.numbers]
        facts = [Fact.read(f.name, rest[i * length :][:length]) for i, f in enumerate(named)]
        towers = len(self.features)
        return Told(tuple(facts[:towers]), tuple(facts[towers:]), options, wants)

    def __str__(self) -> str:
        return ", ".join(str(f) for f in self.features if f.dtype != _NOTHING)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What all ranks know afterwards: who holds how many pairs and columns, and who wants what."""

    rank: int
    pairs: tuple[int, ...]
    columns: tuple[int, ...]
    wants: int


def meet(
    call: str,
    features: Mapping[str, object],
    numbers: Mapping[str, object],
    *,
    options: str,
    wants: int,
    sizes: Sizes,
    group: GroupLike,
) -> Meeting:
    """Tell and hear; raise on every rank if a rule is broken. ``wants`` are bits, joined by or.

    With ``sizes`` given nothing is exchanged or read from the device: only the own arguments are
    checked, and in grad mode every wish counts as somebody's.
    """
    read = sizes is None
    device = next((x.device for x in features.values() if isinstance(x, Tensor)), None)
    mine = Told(
        tuple(Fact.of(name, x, read=False) for name, x in features.items()),
        tuple(Fact.of(name, x, read=read) for name, x in numbers.items()),
        int.from_bytes(blake2b(options.encode(), digest_size=7).digest(), "little"),
        wants,
    )
    if sizes is not None:
        return _trusting(call, mine, sizes, group, device)
    ranks = wire.resolve(call, group)
    told = [mine]
    if ranks.size > 1:
        words = torch.tensor(mine.words(), dtype=torch.int64, device=device)
        heard = all_gather(words[None], sizes="equal", group=group, grad="none").tolist()
        told = [mine.read(row) for row in heard]
    _check(call, told, lambda rule, marks, advice: rank_table(rule, _rows(told), marks, advice))
    joined = 0
    for one in told:
        joined |= one.wants
    return Meeting(
        ranks.rank,
        tuple(one.features[0].vectors for one in told),
        tuple(sum(fact.vectors for fact in one.features[1:]) for one in told),
        joined,
    )


def _trusting(
    call: str, mine: Told, sizes: Sizes, group: GroupLike, device: torch.device | None
) -> Meeting:
    ranks = wire.resolve(call, group)
    own = f"  here: {mine}"
    _check(call, [mine], lambda rule, _, advice: f"{rule}\n{own}\n{advice}", somebody=False)
    count = mine.features[0].vectors
    equal = isinstance(sizes, str) and sizes == "equal"
    pairs = (count,) * ranks.size if equal else given_sizes(call, ranks, sizes)
    rank = ranks.rank
    if pairs[rank] != count:
        raise SizesError(
            f"{call}: sizes={list(pairs)} say that rank {rank} holds {pairs[rank]} pairs, but it "
            f"holds {count}.\nGive what each rank holds, in rank order."
        )
    _require_pairs(call, sum(pairs))
    negatives = sum(fact.vectors for fact in mine.features[2:])
    columns = pairs
    if len(mine.features) > 2:
        more = torch.tensor([negatives], device=device)
        found = all_gather(more, sizes="equal", group=group, grad="none").tolist()
        columns = tuple(a + b for a, b in zip(pairs, found, strict=True))
    return Meeting(rank, pairs, columns, -1 if torch.is_grad_enabled() else 0)


def _rows(told: Sequence[Told]) -> list[str]:
    return [str(one) for one in told]


def _check(
    call: str,
    told: Sequence[Told],
    message: Callable[[str, Mapping[int, str], str], str],
    *,
    somebody: bool = True,
) -> None:
    for kind, rule, marks, advice in _rules(told):
        if marks:
            raise kind(message(f"{call}: {rule}", marks, advice))
    if somebody:
        _require_pairs(call, sum(one.features[0].vectors for one in told))


def _require_pairs(call: str, total: int) -> None:
    if not total:
        raise InputError(f"{call}: no rank has a pair.\nGive at least one rank some.")


def _rules(
    told: Sequence[Told],
) -> Iterator[tuple[type[InputError], str, dict[int, str], str]]:
    """Each rule with the ranks that break it; a later one may rely on those before."""
    first, second = (f.name for f in told[0].features[:2])

    def mark(test: Callable[[Told], str | None]) -> dict[int, str]:
        found = ((rank, test(one)) for rank, one in enumerate(told))
        return {rank: text for rank, text in found if text is not None}

    yield (
        InputError,
        "the ranks ask for one loss.",
        mark(lambda one: None if one.options == _usual(told, _options) else "asks for another"),
        "Call the same loss with the same options on every rank.",
    )
    yield (
        TensorError,
        "features are floating-point tensors with one vector in each row.",
        mark(_no_features),
        f"Give {first} and {second} as (pairs, width) in float32, bfloat16, float16 or float64.",
    )
    yield (
        PieceMismatch,
        "all features have one dtype.",
        mark(lambda one: _odd(one, _usual(told, _dtype), lambda fact: fact.dtype, "another dtype")),
        "Cast them to one dtype before the call.",
    )
    yield (
        PieceMismatch,
        "all features have one width.",
        mark(lambda one: _odd(one, _usual(told, _width), lambda fact: fact.shape[-1], "width")),
        "Project both towers to the same width, on every rank.",
    )
    yield (
        PieceMismatch,
        f"{first} and {second} come in pairs.",
        mark(
            lambda one: (
                None
                if one.features[0].vectors == one.features[1].vectors
                else f"{one.features[0].vectors} and {one.features[1].vectors}"
            )
        ),
        "Give both towers the same number of rows on a rank; ranks may differ.",
    )
    yield (
        InputError,
        "scale and bias are single finite numbers.",
        mark(_no_number),
        "Give a finite number, or a tensor of one element.",
    )


def _usual(told: Sequence[Told], of: Callable[[Told], int]) -> int:
    values = [of(one) for one in told]
    return max(values, key=values.count)


def _options(one: Told) -> int:
    return one.options


def _dtype(one: Told) -> int:
    return one.features[0].dtype


def _width(one: Told) -> int:
    return one.features[0].shape[-1]


def _no_features(one: Told) -> str | None:
    for place, fact in enumerate(one.features):
        if place >= 2 and fact.dtype == _NOTHING:
            continue
        if not 0 <= fact.dtype < len(_FLOATING):
            return f"{fact.name} is not floating-point"
        if len(fact.shape) != 2 and not (place >= 2 and len(fact.shape) == 3):
            return f"{fact.name} has {len(fact.shape)} dimensions"
    return None


def _odd(one: Told, usual: int, of: Callable[[Fact], int], what: str) -> str | None:
    given = (fact for fact in one.features if fact.dtype != _NOTHING)
    names = [fact.name for fact in given if of(fact) != usual]
    return f"{what} of {names[0]}" if names else None


def _no_number(one: Told) -> str | None:
    for place, fact in enumerate(one.numbers):
        if fact.dtype == _NOTHING:
            if place:  # there need not be a bias
                continue
            return f"{fact.name} is missing"
        if not 0 <= fact.dtype < len(_FLOATING):
            return f"{fact.name} is not a floating-point number"
        if math.prod(fact.shape) != 1:
            return f"{fact.name} has shape {fact.shape}"
        if not math.isfinite(fact.value):
            return f"{fact.name} is {fact.value}"
    return None
