"""Many tensors in few messages: bytes of all dtypes packed one after another, without gaps."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from allgrad._core.partition import as_bytes
from allgrad._core.torch_internals import foreach_copy_, unflatten_dense

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor

__all__ = ["Bucket", "buckets"]


class Run(NamedTuple):
    """Consecutive tensors of one dtype in a bucket."""

    dtype: torch.dtype
    tensors: list[Tensor]
    nbytes: int


@dataclass(slots=True)
class Bucket:
    """Tensors of one device that are sent in one message.

    tensors   [ a a ]  [ b ]  [ c c c ]
    packed    [ a a | b | c c c ]           as bytes
    """

    device: torch.device
    runs: list[Run] = field(default_factory=list)
    nbytes: int = 0

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self.nbytes += run.nbytes

    @property
    def tensors(self) -> list[Tensor]:
        return [x for run in self.runs for x in run.tensors]

    def in_place(self) -> Tensor | None:
        """A view of the bytes, if the bucket holds one contiguous tensor only; else None."""
        if len(self.runs) > 1 or len(self.runs[0].tensors) > 1:
            return None
        (x,) = self.runs[0].tensors
        if not x.is_contiguous() or x.is_conj() or x.is_neg():
            return None
        return as_bytes(x)

    def pack(self, flat: Tensor) -> None:
        """Copy all tensors into the bytes of ``flat``."""
        for views, run in self._views(flat):
            foreach_copy_(views, run.tensors)

    def unpack(self, flat: Tensor) -> None:
        """Copy the bytes of ``flat`` into the tensors, whatever their strides."""
        for views, run in self._views(flat):
            if any(x.is_conj() or x.is_neg() for x in run.tensors):
                for x, view in zip(run.tensors, views, strict=True):
                    x.copy_(view)  # torch writes into such views one by one only
            else:
                foreach_copy_(run.tensors, views)

    def _views(self, flat: Tensor) -> Iterator[tuple[list[Tensor], Run]]:
        """Views of ``flat``, one for each tensor; made in one call for each dtype."""
        start = 0
        for run in self.runs:
            part = flat[start : start + run.nbytes].view(run.dtype)
            yield list(unflatten_dense(part, run.tensors)), run
            start += run.nbytes


def buckets(tensors: Sequence[Tensor], limit: int) -> list[Bucket]:
    """Put the tensors into buckets of at most ``limit`` bytes, one device after another.

    A larger tensor has a bucket of its own; a tensor without elements is in no bucket. Wide dtypes
    come first, so that every tensor is aligned without gaps (test_mixed_dtypes_leave_no_gaps).
    """
    kinds: defaultdict[torch.device, defaultdict[torch.dtype, tuple[list[Tensor], list[int]]]]
    kinds = defaultdict(lambda: defaultdict(lambda: ([], [])))
    specs = map(attrgetter("device", "dtype", "nbytes"), tensors)
    for x, (device, dtype, nbytes) in zip(tensors, specs, strict=True):
        if nbytes:
            held, lengths = kinds[device][dtype]
            held.append(x)
            lengths.append(nbytes)
    found = []
    for device, by_dtype in kinds.items():
        bucket = Bucket(device)
        for dtype in sorted(by_dtype, key=lambda dtype: (-dtype.itemsize, str(dtype))):
            held, lengths = by_dtype[dtype]
            ends = list(accumulate(lengths))
            first = sent = 0
            while first < len(held):
                last = bisect_right(ends, sent + limit - bucket.nbytes, lo=first)
                if last == first:
                    if bucket.runs:
                        found.append(bucket)
                        bucket = Bucket(device)
                        continue
                    last = first + 1  # larger than a bucket
                bucket.add(Run(dtype, held[first:last], ends[last - 1] - sent))
                first, sent = last, ends[last - 1]
        found.append(bucket)
    return found
