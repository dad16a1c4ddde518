"""Compare the states of the ranks: by hash first, entry by entry only if the hashes differ.

    rank 0   specs A         hash 1                    specs A  A  B
    rank 1   specs A   --->  hash 1   --- differ --->  specs A  A  B
    rank 2   specs B         hash 2                    specs A  A  B

If the hashes are equal, each rank has sent one message of 56 bytes. Otherwise one rank for each
distinct hash sends its specs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from allgrad._wire import primitives as wire
from allgrad.collectives.all_gather import all_gather, gather_sizes
from allgrad.errors import rank_table
from allgrad.module_state import _messages as messages
from allgrad.module_state._entries import tensors_and_others

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from allgrad._wire.primitives import GroupLike
    from allgrad.errors import InputError
    from allgrad.module_state._entries import Entry
    from allgrad.module_state._specs import EntrySpec

__all__ = ["StateExchange"]


@dataclass(frozen=True, slots=True)
class StateExchange:
    """The messages of one call, between the ranks of a group."""

    caller: str
    group_argument: GroupLike
    call: wire.Call
    device: torch.device  # a device whose tensors the group can send

    @classmethod
    def open(cls, caller: str, group: GroupLike, held: Sequence[Entry]) -> StateExchange:
        """Resolve the group, and choose the device for its messages."""
        call = wire.resolve(caller, group)
        device = torch.device("cpu")
        if torch.accelerator.is_available():
            used = {entry.value.device for entry in tensors_and_others(held)[0]}
            others = sorted(str(device) for device in used if device.type not in {"cpu", "meta"})
            accelerator = torch.accelerator.current_accelerator() or device
            device = torch.device(others[0]) if others else accelerator
        return cls(caller, group, call, call.group.message_device(device))

    def compare(
        self,
        summary: str,
        specs: Callable[[], Mapping[str, EntrySpec]],
        problem: InputError | None = None,
    ) -> list[Mapping[str, EntrySpec]] | None:
        """Return None if every rank has this summary, else the specs of each rank.

        If a rank has a problem, every rank raises, with a table.
        """
        if self.call.size == 1:
            if problem is not None:
                raise problem
            return None
        own = messages.encode_digest(summary, problem)
        digests = self._gather(own, [messages.DIGEST_WORDS] * self.call.size)
        if problem is None and all(digest == own for digest in digests):
            return None
        problems = [messages.decode_digest(words, rank) for rank, words in enumerate(digests)]
        senders: dict[tuple[int, ...], int] = {}
        for rank, words in enumerate(digests):
            senders.setdefault(tuple(words), rank)
        message: list[int] = []
        if senders[tuple(own)] == self.call.rank:
            encode = messages.encode_problem
            message = messages.encode_specs(specs()) if problem is None else encode(problem)
        sent = self._gather(message)
        if any(problems):
            self._raise(problem, problems, [sent[senders[tuple(words)]] for words in digests])
        decoded = {rank: messages.decode_specs(sent[rank], rank) for rank in senders.values()}
        return [decoded[senders[tuple(words)]] for words in digests]

    def from_rank(self, src: int, message: list[int]) -> list[int]:
        """Give every rank the message of ``src``."""
        return self._gather(message if self.call.rank == src else [])[src]

    def _gather(self, words: list[int], lengths: Sequence[int] | None = None) -> list[list[int]]:
        own = torch.tensor(words, dtype=torch.int64, device=self.device)
        lengths = lengths or gather_sizes(own, group=self.group_argument)
        joined = all_gather(own, sizes=lengths, group=self.group_argument)
        return [part.tolist() for part in joined.cpu().split(list(lengths))]

    def _raise(
        self,
        own: InputError | None,
        problems: Sequence[type[InputError] | None],
        sent: Sequence[list[int]],
    ) -> NoReturn:
        """Raise the problem of the first rank that has one; a rank with a problem keeps its class."""
        failed = [rank for rank, problem in enumerate(problems) if problem]
        texts = {rank: messages.decode_problem(sent[rank], rank) for rank in failed}
        marks = {
            rank: text.partition("\n")[0].removeprefix(f"{self.caller}: ")
            for rank, text in texts.items()
        }
        rows = ["not ready" if problem else "ready" for problem in problems]
        rule, _, advice = texts[failed[0]].partition("\n")
        error = problems[failed[0]] if own is None else type(own)
        assert error is not None
        raise error(rank_table(rule, rows, marks, advice))
