"""Keys of a nest: one text on every rank, and one order, whatever the insertion order."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from allgrad.containers import split_tensors
from allgrad.errors import InputError


class Pair(NamedTuple):
    left: Any
    right: Any


class Size(tuple, enum.Enum):
    __slots__ = ()
    SMALL = (1, 2)


Modality = enum.Enum("Modality", "IMAGE TEXT")
Access = enum.Flag("Access", "READ WRITE")


def test_different_keys_have_different_texts() -> None:
    keys = [
        Modality.IMAGE, Modality.TEXT, Access.READ, Access.WRITE, Access.READ | Access.WRITE,
        (), ("a",), ("b",), ("a", "b"), (("a",), "b"), ("a", ("b",)), (1,), (Modality.IMAGE,),
        frozenset(), frozenset({"a"}), frozenset({"a", "b"}), b"a", b"b", "a", "b", None, "None",
        0.5, 0.25, float("inf"), 1j, np.int64(3), np.int64(4), np.float32(0.1), 0.1,
        torch.float32, torch.float64, torch.device("cpu"), torch.device("cuda", 1), int, float, "int",
    ]  # fmt: skip
    texts = [split_tensors({key: torch.ones(2)})[1].keys() for key in keys]
    assert len(set(texts)) == len(keys)


def test_equal_keys_have_one_text() -> None:
    for alike in (
        [1, 1.0, True, np.int64(1), np.float32(1), 1 + 0j, decimal.Decimal(1)],
        [0.5, np.float32(0.5), decimal.Decimal("0.5")],
        [(1, 2), (True, 2.0), Pair(1, 2), Size.SMALL, torch.Size((1, 2))],
        [frozenset({1, "a"}), frozenset({"a", 1.0})],
    ):
        texts = {split_tensors({key: torch.ones(2)})[1].keys() for key in alike}
        assert len(texts) == 1


def test_tensors_under_keys_that_cannot_be_sorted_go_by_their_text() -> None:
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    one = {"b": {Modality.TEXT: x, Modality.IMAGE: [4, y]}, "a": z}
    two = {"b": {Modality.IMAGE: [4, y], Modality.TEXT: x}, "a": z}
    for nest in (one, two, collections.OrderedDict(two)):
        found, frame = split_tensors(nest)
        assert [id(tensor) for tensor in found] == [id(z), id(y), id(x)]
        assert frame.keys() == "['a'], ['b'][Modality.IMAGE][1], ['b'][Modality.TEXT]"
        assert frame.names() == ["x['a']", "x['b'][Modality.IMAGE][1]", "x['b'][Modality.TEXT]"]
        rebuilt = frame([30, 20, 10])
        assert rebuilt == {"a": 30, "b": {Modality.IMAGE: [4, 20], Modality.TEXT: 10}}
        assert list(rebuilt["b"]) == list(nest["b"])
    assert split_tensors({Modality.TEXT: x, Modality.IMAGE: y})[1]([1, 2]) == {
        Modality.IMAGE: 1,
        Modality.TEXT: 2,
    }


def test_a_name_shows_the_members_of_a_set_in_one_order() -> None:
    key = frozenset("hgfedcba")  # its repr goes by hashes, which each process makes for itself
    names = split_tensors({key: Pair(1, torch.ones(2))})[1].names()
    assert names == ["x[{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}].right"]


@dataclasses.dataclass(frozen=True)
class Key:
    name: str
    shown: int = dataclasses.field(default=0, compare=False)


class Named:
    """Compared by value, without an order and without a text."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def test_dataclasses_go_by_the_fields_that_they_are_compared_by() -> None:
    x, y = torch.ones(1), torch.ones(2)
    for nest in ({Key("a"): x, Key("b"): y}, {Key("b", 1): y, Key("a", 2): x}):
        found, frame = split_tensors(nest)
        assert [id(tensor) for tensor in found] == [id(x), id(y)]
        assert frame.keys() == "[Key('a')], [Key('b')]"


def test_keys_without_a_text_and_an_order_are_refused_unless_they_are_compared_by_identity() -> (
    None
):
    x, y = torch.ones(1), torch.ones(2)
    for one, two in ((Named("a"), Named("b")), ((Named("a"), 1), (Named("b"), 1))):
        with pytest.raises(InputError, match="could not tell which of theirs"):
            split_tensors({one: x, two: y})[1].keys()
        assert split_tensors({one: [x, y]})[0] == [x, y]
    # These have an order, but no text.
    dates, thirds = (
        [dt.date(2020, 1, n) for n in (1, 2)],
        [fractions.Fraction(n, 3) for n in (1, 2)],
    )
    for one, two in (dates, thirds):
        for nest in ({one: x, two: y}, {two: y, one: x}):
            assert [id(tensor) for tensor in split_tensors(nest)[0]] == [id(x), id(y)]
    layers = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for one, two in (layers, (object(), object())):
        assert [id(tensor) for tensor in split_tensors({one: y, two: x})[0]] == [id(y), id(x)]
