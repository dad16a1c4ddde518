"""A queue of the keys of earlier steps, which all ranks share."""

from __future__ import annotations

import zlib
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from allgrad._core.held_group import HoldsGroup
from allgrad._wire.consistency import is_checking
from allgrad._wire.groups import find_group
from allgrad.collectives.all_gather import all_gather
from allgrad.errors import InputError, ModeError, PieceMismatch
from allgrad.losses._arguments.agreement import CallSpec, agree, no_values, require
from allgrad.losses._arguments.feature_checks import check_features, check_per_row, require_device
from allgrad.losses._rows.relations import Keys

if TYPE_CHECKING:
    from allgrad.types import GroupLike

__all__ = ["KeyQueue", "QueuedKeys", "check_queue", "queued_keys"]


class _Queued:
    """What the losses need to know of a queue."""

    features: Tensor
    ids: Tensor | None
    count: Tensor

    @property
    def filled(self) -> Tensor:
        """Which rows of ``features`` hold a key."""
        places = torch.arange(len(self.features), device=self.features.device)
        return places >= len(self.features) - self.count

    def spec(self) -> str:
        """What must be the same on every rank: the size, and in checked mode what it holds."""
        text = f"queue of {len(self.features)}"
        if self.features.is_meta or not is_checking():
            return text
        text += f", {int(self.count)} filled"
        held = [self.features] if self.ids is None else [self.features, self.ids]
        return f"{text}, checksum {zlib.crc32(repr([*map(_checksum, held)]).encode()):08x}"

    def check_width(self, features: Tensor) -> None:
        """Raise if features do not fit the queue's keys."""
        width = self.features.shape[1]
        require(
            features.shape[-1] == width,
            PieceMismatch,
            f"the queue holds keys of width {width}, not {features.shape[-1]}.",
            "Give features of the queue's width, or make another queue.",
        )


def _checksum(x: Tensor) -> int:
    """Of the bytes, and of their places."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(x.dtype.itemsize, torch.int64)
    flat = x.contiguous().view(whole).reshape(-1)
    return int((flat * torch.arange(1, len(flat) + 1, device=x.device)).sum())


def check_queue(queue: object, features: Tensor) -> None:
    """Raise unless this is no queue, or one for such features."""
    if queue is None:
        return
    require(
        isinstance(queue, _Queued),
        InputError,
        f"queue is {type(queue).__name__}, not a KeyQueue.",
        "Make one with KeyQueue(capacity, width) on every rank.",
    )
    assert isinstance(queue, _Queued)
    queue.check_width(features)
    require_device({"the queue": queue.count}, "query", features)


def queued_keys(queue: _Queued | None, first: int, like: Tensor) -> list[Keys]:
    """The columns of a queue as it is now: what is pushed later is not seen."""
    if queue is None:
        return []
    return [Keys(queue.features.to(like), queue.ids, filled=queue.filled, first=first)]


class QueuedKeys(_Queued):
    """The tensors of a queue, as a compiled graph passes them on."""

    def __init__(self, features: Tensor, count: Tensor, ids: Tensor | None = None) -> None:
        """Hold the tensors of a queue."""
        self.features, self.count, self.ids = features, count, ids


class KeyQueue(HoldsGroup, _Queued, nn.Module):
    """The last keys of all ranks, the same on every rank (MoCo, cross-batch memory).

        rank 0   push [ a a ]         [ ... a a | b | c c c ]
        rank 1   push [ b ]     --->  [ ... a a | b | c c c ]    the oldest at the front are dropped
        rank 2   push [ c c c ]       [ ... a a | b | c c c ]

    It is filled and dropped in rank order, has no gradient, and is part of ``state_dict``. With
    ``ids=True`` each key has an id, so that a loss can tell which of them are not negatives.

    ``push`` raises if it is full on some ranks only; within ``checked()`` it raises, and so do the losses,
    if the ranks hold different keys. After one rank alone loaded a checkpoint: ``module_state.sync(queue)``.

    Cost: ``push`` sends each rank's keys to all, and then their ids, after one small message. Every rank
    holds ``capacity`` keys.
    """

    def __init__(
        self,
        capacity: int,
        width: int,
        *,
        ids: bool = False,
        group: GroupLike = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make an empty queue."""
        super().__init__()
        lengths: tuple[object, ...] = capacity, width
        if not all(isinstance(n, Integral) and int(n) > 0 for n in lengths):
            raise InputError(f"KeyQueue: {capacity=}, {width=}.\nGive positive whole numbers.")
        self.capacity, self.width, self.group = capacity, width, group
        # The newest key stands last; what is not filled yet is at the front.
        with torch.inference_mode(False):  # autograd is to save them
            made = torch.zeros(capacity, dtype=torch.int64, device=device) if ids else None
            features = torch.zeros(capacity, width, device=device, dtype=dtype)
            count = torch.zeros((), dtype=torch.int64, device=device)
        self.register_buffer("features", features)
        self.register_buffer("ids", made)
        self.register_buffer("count", count)

    def _state(self) -> str:
        """``spec``, and whether it is full. Not the count, with which no push would be like the one before."""
        alone = (
            find_group("KeyQueue.push", self.group).size == 1
        )  # and need not wait for its device
        is_full = not alone and not self.features.is_meta and int(self.count) == self.capacity
        return f"{self.spec()}, {'full' if is_full else 'not full'}"

    def extra_repr(self) -> str:
        return f"{self.capacity}, {self.width}, ids={self.ids is not None}"

    def push(self, key: Tensor, ids: Tensor | None = None) -> None:
        """Append the keys of all ranks in rank order, and drop the oldest. In a graph, a graph break."""
        if torch.compiler.is_compiling():
            from allgrad.losses._graphs import graph_breaks

            graph_breaks.run_push(self._push, key, ids)
        else:
            self._push(key, ids)

    # Buffers made in inference mode would be of no use to a later loss with a gradient.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _push(self, key: Tensor, ids: Tensor | None) -> None:

        def check() -> CallSpec:
            check_features({"key": key})
            if key.is_meta != self.features.is_meta:
                raise ModeError(no_values("the keys"))
            check_per_row("ids", ids, "key", len(key), whole=True)
            # Keys are moved to the queue, ids are not.
            require_device({"ids": ids}, "the queue", self.features)
            self.check_width(key)
            require(
                (ids is None) == (self.ids is None),
                InputError,
                f"the queue holds {'no ids' if self.ids is None else 'ids'}.",
                "Make it with ids=True and push ids with each key, or neither.",
            )
            device = self.features.device.type
            same = {
                "queue": self._state(),
                "dtype": key.dtype,
                "device of the queue": device,
            }
            return CallSpec(same, (len(key),))

        agreed = agree("KeyQueue.push", {"key": key, "ids": ids}, check, self.group)
        sizes = agreed.column(0)
        new = all_gather(key.detach(), sizes=sizes, group=self.group, grad="none")
        new_ids = None
        if ids is not None:
            new_ids = all_gather(ids.long(), sizes=sizes, group=self.group, grad="none")
        # Tensors of their own: a graph that still uses the earlier ones must not see them change.
        features = torch.cat([self.features, new.to(self.features)])[-self.capacity :].clone()
        if self.ids is not None and new_ids is not None:
            new_ids = torch.cat([self.ids, new_ids])[-self.capacity :].clone()
        count = (self.count + len(new)).clamp(max=self.capacity)
        # All or none: after a message that failed, or an interrupt, ids must be those of their keys
        # (test_a_push_that_fails_changes_nothing).
        self.features, self.ids, self.count = features, new_ids, count
