"""What a rank waits for in a call, in words that ranks compare when they wait too long.

all_reduce of (3,) float32                                       the same on every rank
all_gather of (5, 8) float32 in pieces of 2, 3                   the same on every rank
all_reduce of (6,) float32 for ['a'], ['b'][0]                   with the keys of a nest
all_to_all of (*, 8) float32 sending 2, 3 receiving 2, 1         one sends what the other receives
scatter (all_to_all) of (*, 8) float32 sending -, 0 receiving -, -   an empty message, and none
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias, Union

from torch import Tensor

from allgrad._wire.calls import describe_shapes
from allgrad._wire.groups import AGREEMENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from allgrad._wire.calls import Call

__all__ = ["Alike", "Peers", "all_fit", "describe", "describe_exchange", "nest_code"]

# The ranks that this one sends to and receives from; all if none are named.
Peers: TypeAlias = "tuple[Sequence[int], Sequence[int]] | None"
# A tensor that is alike on every rank, if all is well; with counts by rank that are so too; or with
# what this rank sends to each and receives from each.
Alike: TypeAlias = Union[
    Tensor, "tuple[Tensor, Sequence[int]]", "tuple[Tensor, Sequence[int], Sequence[int], Peers]"
]
_EXCHANGE = re.compile(r"(.*) sending ([-\d, ]*) receiving ([-\d, ]*)")


def describe(call: Call, alike: Alike | None) -> str:
    """The call in words: its name, what it does on the wire, and what this rank brought to it."""
    operation, root = call.group.doing
    if operation == AGREEMENT:  # in which ranks compare their calls themselves
        return "checked: the ranks agree on their calls"
    does = "" if operation == call.name else f" ({operation})"
    ends = "" if root < 0 else f" {'to' if operation == 'reduce' else 'from'} rank {root}"
    head = f"{call.name}{does}{ends}"
    if alike is None:
        return head
    if isinstance(alike, Tensor):
        return f"{head} of {describe_shapes([alike])}{_keys(call.nest)}"
    x = alike[0]
    if len(alike) == 2:
        pieces = f" in pieces of {_numbers(alike[1])}"
        return f"{head} of {describe_shapes([x])}{_keys(call.nest)}{pieces}"
    return describe_exchange(call.name, call.nest, x.dtype, x.shape[1:], *alike[1:])


def describe_exchange(  # noqa: PLR0917
    name: str,
    nest: str,
    dtype: torch.dtype,
    row: Sequence[int],
    send: Sequence[int],
    receive: Sequence[int],
    peers: Peers,
) -> str:
    """The same for an exchange of rows."""
    to, sources = (None, None) if peers is None else peers
    does = "" if name == "all_to_all" else " (all_to_all)"
    blocks = (
        f"{name}{does} of ({', '.join(['*', *map(str, row)])}) {str(dtype).removeprefix('torch.')}"
    )
    amounts = f"sending {_numbers(send, to)} receiving {_numbers(receive, sources)}"
    return f"{blocks}{_keys(nest)} {amounts}"


def all_fit(brought: Mapping[int, str]) -> bool:
    """Tell whether ranks are in one call, and what they brought fits together, where they told it."""
    if len({text.partition(" of ")[0] for text in brought.values()}) > 1:
        return False
    found = {rank: _parsed(text) for rank, text in brought.items() if " of " in text}
    if len({head for head, _, _ in found.values()}) > 1:
        return False
    return all(
        n == found[peer][2][rank]
        for rank, (_, sends, _) in found.items()
        for peer, n in enumerate(sends)
        if peer in found
    )


@lru_cache(maxsize=1024)
def nest_code(nest: str) -> int:
    """A number for the keys of a nest, the same in every process."""
    return zlib.crc32(nest.encode(errors="backslashreplace"))


_SHOWN = 100  # characters of a nest's keys


def _keys(nest: str) -> str:
    if not nest:
        return ""
    return f" for {nest if len(nest) <= _SHOWN else f'{nest[:_SHOWN]}... ({nest_code(nest):08x})'}"


def _parsed(text: str) -> tuple[str, list[str], list[str]]:
    found = _EXCHANGE.fullmatch(text)
    if found is None:
        return text, [], []
    return found[1], found[2].split(", "), found[3].split(", ")


def _numbers(counts: Sequence[int], peers: Sequence[int] | None = None) -> str:
    return ", ".join(
        str(n) if peers is None or rank in peers else "-" for rank, n in enumerate(counts)
    )
