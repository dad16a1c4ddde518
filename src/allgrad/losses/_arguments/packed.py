"""Several tensors of each rank in one message: features, and whole numbers that belong to them.

    rank 0   [ features | ids ]                 features of all ranks, ids of all ranks
    rank 1   [ features | ids ]       --->      features of all ranks, ids of all ranks
    rank 2   [ features | ids ]                 features of all ranks, ids of all ranks

Whole numbers travel as the bytes of features, which a gather copies and nobody computes with. Their
gradient is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from allgrad._autograd.below_transforms import below_transforms
from allgrad.collectives.all_gather import all_gather
from allgrad.losses._arguments.expected_calls import Payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allgrad.losses._arguments.agreement import Agreement
    from allgrad.types import Grad, GroupLike

__all__ = ["Packing", "Part", "gather_rows"]

# Up to so many bytes of all ranks the row of an agreement travels with features. Of more, taking the row
# out again takes longer than a message of its own.
ROW_BESIDE_ON_CPUS = 2**22
ROW_BESIDE_ON_DEVICES = 2**25


def gather_rows(
    own: Tensor, sizes: tuple[int, ...], group: GroupLike, agreed: Agreement | None
) -> Tensor:
    """The rows of a matrix of all ranks; with them, the row of the agreement if it has one."""
    if agreed is None or agreed.call is None:
        return all_gather(own, sizes=sizes, group=group, grad="none")
    elements = tuple(size * own.shape[1] for size in sizes)
    kind = own.device.type
    most = ROW_BESIDE_ON_CPUS if kind == "cpu" else ROW_BESIDE_ON_DEVICES
    is_small = sum(elements) * own.itemsize <= most
    if agreed.call.payload is None and is_small and kind != "meta":
        agreed.call.payload = Payload(elements, own.dtype, own.device)
    if agreed.row is None:
        joined = all_gather(own, sizes=sizes, group=group, grad="none")
        agreed.confirm(None)
        return joined
    row = agreed.row.to(own.device).view(own.dtype)
    counts = tuple(count + len(row) for count in elements)
    sent = torch.cat([own.reshape(-1), row])
    messages = all_gather(sent, sizes=counts, group=group, grad="none").split(counts)
    agreed.confirm(torch.cat([message[-len(row) :] for message in messages]).view(torch.int64))
    return torch.cat([message[: -len(row)] for message in messages]).view(sum(sizes), own.shape[1])


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of this rank, and how many rows of it each rank holds. Whole numbers are int64."""

    own: Tensor
    rows: tuple[int, ...]
    is_plain: bool = False  # below every transform, so that the joined one can be read


class _JoinedSpec(NamedTuple):
    shape: tuple[int, ...]
    is_floating: bool


class Packing:
    """The layout of one message: a vector of one dtype for each rank.

    The first part must be floating-point; others are of its dtype, or whole numbers.
    """

    def __init__(self, parts: Sequence[Part], agreed: Agreement) -> None:
        """A message of these parts, and of this rank's row of the agreement if it has one."""
        self.parts, self.dtype, self.agreed = parts, parts[0].own.dtype, agreed
        self.specs = [
            _JoinedSpec((sum(part.rows), *part.own.shape[1:]), part.own.is_floating_point())
            for part in parts
        ]
        self.per_row = [self._elements_per_row(part.own) for part in parts]
        by_rank = zip(*(part.rows for part in parts), strict=True)
        self.counts = [
            [n * each for n, each in zip(rows, self.per_row, strict=True)] for rows in by_rank
        ]
        self.sizes = tuple(map(sum, self.counts))  # of each rank's message
        self.payload = Payload(self.sizes, self.dtype, parts[0].own.device)
        if agreed.row is not None:
            last = self._elements_per_row(agreed.row[None])
            self.counts = [[*counts, last] for counts in self.counts]
            self.sizes = tuple(map(sum, self.counts))

    def _elements_per_row(self, x: Tensor) -> int:
        width = x.shape[1:].numel()
        return width if x.is_floating_point() else width * (8 // self.dtype.itemsize)

    def pack(self) -> Tensor:
        """The parts of this rank; floating-point ones are differentiable. Once: they are let go of.

        A loss that somebody keeps after backward would keep them too (test_nothing_is_kept_after_backward).
        """
        flat = [part.own.reshape(-1) for part in self.parts]
        self.parts, call = (), self.agreed.call
        # Not where each part has a message of its own. A row beside meta tensors could not be read.
        if call is not None and call.payload is None and self.payload.device.type != "meta":
            call.payload = self.payload
        if not any(map(len, flat)):
            # Torch cuts the graph of the gradient behind a cat of nothing, and this rank would not
            # take part in the second derivative (the kind "empty" of the tests).
            return sum((x for x in flat[1:] if x.is_floating_point()), start=flat[0])
        # As rows of a matrix: of several vectors the cut is behind the empty ones.
        rows = [
            (x if x.is_floating_point() else x.contiguous().view(self.dtype))[None] for x in flat
        ]
        return torch.cat(rows, 1)[0]

    def with_row(self, joined: Tensor) -> Tensor:
        """The message: the parts and the row, which not every call has.

        What autograd saves is without it: a checkpoint may make the call again in another way.
        """
        if self.agreed.row is None:
            return joined
        # As rows of a matrix, because of the same cut.
        return torch.cat(
            [joined[None], self.agreed.row.to(joined.device).view(self.dtype)[None]], 1
        )[0]

    def gather_apart(self, group: GroupLike) -> list[Tensor]:
        """Each part of all ranks, a message for each: torch.func has no bytes of another dtype."""

        def gather(part: Part) -> Tensor:
            grad: Grad = "sum" if part.own.is_floating_point() else "none"
            return all_gather(part.own, sizes=part.rows, group=group, grad=grad)

        found = [
            below_transforms(gather, part) if part.is_plain else gather(part) for part in self.parts
        ]
        self.agreed.confirm(None)
        return found

    def copies(self) -> list[Tensor]:
        """Each part of one rank alone."""
        self.agreed.confirm(None)
        return [part.own.clone() for part in self.parts]

    def confirm(self, received: Tensor) -> None:
        """Raise ``Changed`` if the rows of all ranks are not those that were expected."""
        if self.agreed.row is None:
            self.agreed.confirm(None)
        else:
            pieces = received.detach().split(self.sizes)
            rows = [piece[-counts[-1] :] for piece, counts in zip(pieces, self.counts, strict=True)]
            self.agreed.confirm(torch.cat(rows).view(torch.int64))

    def unpack(self, received: Tensor) -> list[Tensor]:
        """Each part of all ranks, joined in rank order."""
        pieces = [
            message.split(counts)
            for message, counts in zip(received.split(self.sizes), self.counts, strict=True)
        ]
        found = []
        for number, spec in enumerate(self.specs):
            joined = torch.cat([piece[number] for piece in pieces])
            if not spec.is_floating:
                joined = joined.detach().view(torch.int64)
            found.append(joined.reshape(spec.shape))
        return found
