"""``join``: a loop over batches in which every rank stays until all ranks are done."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from allgrad._wire import primitives as wire
from allgrad._wire.codec import HEADER_WORDS, Reader, Writer
from allgrad._wire.diagnosis import mark_known
from allgrad.containers.kinds import nodes
from allgrad.containers.nests import map_tensors, tensors
from allgrad.errors import InputError, RankRaised, rank_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from allgrad._wire.calls import Call
    from allgrad.types import GroupLike

__all__ = ["join"]

Batch = TypeVar("Batch")


class _State(Enum):
    """What a rank tells before a step."""

    BATCH = 0
    DONE = 1
    RAISED = 2
    NO_ROWS = 3  # a batch of which nobody knows how many rows it has
    NEVER = 4  # done before the first batch, and no empty one was given
    NOT_DENSE = 5  # a batch with a tensor of which no empty one can be made
    UNREADABLE = 6  # a batch whose tensors cannot be listed, or that raised when it was emptied


_STATES = tuple(_State)
_NO_EMPTY_ONE = frozenset({_State.NOT_DENSE, _State.UNREADABLE})
_WORDS = HEADER_WORDS + 2


class _Look(NamedTuple):
    """What a rank tells about a batch, and the same batch without rows."""

    state: _State
    rows: int = 0
    emptied: Any = None
    error: Exception | None = None


def join(
    batches: Iterable[Batch], *, empty: Batch | None = None, group: GroupLike = None
) -> Iterator[tuple[Batch, tuple[int, ...]]]:
    """Give every rank batches until all ranks are done; a rank that is done gets empty ones.

        rank 0   aa a          step 0 [ a a ]       step 1 [ a ]     step 2 [ ]
        rank 1   b      --->          [ b ]                [ ]              [ ]
        rank 2   cc c ccc             [ c c ]              [ c ]            [ c c c ]
                               sizes  (2, 1, 2)            (1, 0, 1)        (0, 0, 3)

    Each step gives the batch, and the rows of every rank. A batch is any nest of tensors with rows
    along dim 0, all of them dense: sparse and nested tensors and ``PackedSequence`` raise, on every
    rank. An empty one is the rank's last batch, or ``empty``, with no rows; what is not a
    tensor in it stays as it is. The rank runs the same step on it: its collectives, their backward
    and DDP's all take part, with nothing. So the step equals one process on the joined rows, if it
    is right for ranks that hold no rows: divide sums by ``sum(sizes)``, since the mean of no rows
    is not a number.

    A rank that never has a batch needs ``empty``. An iterable that raises on one rank raises on
    every rank. Leave the loop on every rank or on none.

    Gradient: nothing to choose; batches are this rank's own.

    Cost: one message of four numbers from each rank to each, before each step and at the end.
    """
    call = wire.resolve("join", group)
    source = _started_in_the_loop(batches)
    last = None if empty is None else _look_at(empty)
    while True:
        batch = None
        try:
            batch = next(source)
            found = _look_at(batch)
        except StopIteration:
            found = _Look(_State.NEVER if last is None else _State.DONE)
        except Exception as raised:  # noqa: BLE001 - told to all ranks, then raised again
            found = _Look(_State.RAISED, error=raised)
        if last is not None and last.state in _NO_EMPTY_ONE and found.state is not _State.RAISED:
            found = last
        states, sizes = _exchange(call, found.state, found.rows)
        if found.state is _State.RAISED:
            assert found.error is not None
            mark_known(found.error, call)
            raise found.error
        _require_batches(states, sizes, found.error)
        if all(s in {_State.DONE, _State.NEVER} for s in states):
            return
        if found.state is _State.DONE:
            assert last is not None
            batch = map_tensors(_without_rows, last.emptied)  # new tensors at each step
        elif empty is None:
            last = found
        assert batch is not None  # it would have no rows
        yield batch, sizes


def _started_in_the_loop(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches. What ``iter`` raises is raised by the first ``next``, where all ranks are told."""
    yield from batches


def _exchange(call: Call, state: _State, rows: int) -> tuple[list[_State], tuple[int, ...]]:
    if call.size == 1:
        return [state], (rows,)
    message = Writer("join")
    message.choice(state, _STATES)
    message.number(rows)
    device = call.group.message_device(torch.device("cpu"))
    sent = torch.tensor(message.padded(_WORDS), dtype=torch.int64, device=device)
    received = wire.all_gather(call, sent, (_WORDS,) * call.size).view(-1, _WORDS).tolist()
    readers = [Reader(words, "join", rank) for rank, words in enumerate(received)]
    found = [(reader.choice(_STATES), reader.number(-1)) for reader in readers]
    return [state for state, _ in found], tuple(rows for _, rows in found)


def _require_batches(states: list[_State], sizes: tuple[int, ...], error: Exception | None) -> None:
    """Raise on every rank what one rank cannot do; ``error`` is what this one's batch raised."""
    texts = {
        _State.BATCH: "{} rows",
        _State.DONE: "done",
        _State.RAISED: "its iterable raised",
        _State.NO_ROWS: "a batch without a tensor that has rows",
        _State.NEVER: "has no batch at all",
        _State.NOT_DENSE: "a batch with a tensor that is not dense",
        _State.UNREADABLE: "a batch that cannot be read or emptied",
    }
    shown = [texts[state].format(n) for state, n in zip(states, sizes, strict=True)]
    if _State.RAISED in states:
        marks = {r: "raised" for r, s in enumerate(states) if s is _State.RAISED}
        advice = "The error of that rank tells why."
        raise RankRaised(rank_table("join: the batches of a rank raised.", shown, marks, advice))
    if _State.UNREADABLE in states:
        marks = {r: "raised" for r, s in enumerate(states) if s is _State.UNREADABLE}
        rule = "join: a rank that is done takes part with an empty batch, made of its last one."
        advice = "The error of that rank tells why." if error is None else str(error)
        raise InputError(rank_table(rule, shown, marks, advice)) from error
    if _State.NOT_DENSE in states:
        marks = {
            r: "sparse, nested or packed" for r, s in enumerate(states) if s is _State.NOT_DENSE
        }
        rule = "join: a batch is a nest of dense tensors with rows along dim 0."
        advice = "Give dense tensors, and make sparse, nested or packed ones of them in the step."
        raise InputError(rank_table(rule, shown, marks, advice))
    if _State.NO_ROWS in states:
        marks = {r: "no rows" for r, s in enumerate(states) if s is _State.NO_ROWS}
        rule = "join: a batch is a nest of tensors with rows along dim 0."
        advice = "Give tensors, e.g. (x, y) or a dict of them."
        raise InputError(rank_table(rule, shown, marks, advice))
    if _State.NEVER in states and any(s is not _State.NEVER for s in states):
        marks = {
            r: "nothing to make an empty one of" for r, s in enumerate(states) if s is _State.NEVER
        }
        rule = "join: a rank that is done takes part with an empty batch, made of its last one."
        advice = "Give empty=, a batch of the same kind; its rows are not used."
        raise InputError(rank_table(rule, shown, marks, advice))


def _look_at(batch: object) -> _Look:
    """The rows of a batch, by its first tensor that has dimensions. Raises nothing."""
    try:
        found = tensors(batch)
        if not all(map(_is_dense, found)) or any(
            isinstance(n, PackedSequence) for n in nodes(batch)
        ):
            return _Look(_State.NOT_DENSE)
        rows = next((len(x) for x in found if x.dim()), -1)
        emptied = map_tensors(_without_rows, batch)
    except Exception as raised:  # noqa: BLE001 - told to all ranks, then raised
        return _Look(_State.UNREADABLE, error=raised)
    return _Look(_State.NO_ROWS if rows < 0 else _State.BATCH, rows, emptied)


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested


def _without_rows(x: Tensor) -> Tensor:
    return x[:0] if x.dim() else x
