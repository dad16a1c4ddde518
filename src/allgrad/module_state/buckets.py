"""Many tensors as few messages: bytes of any dtypes packed one after another, without gaps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch._utils import _unflatten_dense_tensors

from allgrad.module_state.facts import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["Bucket", "buckets"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one device that travel together.

    tensors   [ a a ]  [ b ]  [ c c c ]
    packed    [ a a | b | c c c ]           as bytes
    """

    tensors: tuple[Tensor, ...]
    nbytes: int

    def pack(self) -> Tensor:
        """The bytes of all; one contiguous tensor alone is not copied."""
        if len(self.tensors) == 1:
            return as_bytes(self.tensors[0])
        flat = self.empty()
        for part, run in self._runs(flat):
            torch._foreach_copy_(_places(part, run), run)
        return flat

    def unpack(self, flat: Tensor) -> None:
        """Write the bytes into the tensors, whatever their strides."""
        for part, run in self._runs(flat):
            torch._foreach_copy_(run, _places(part, run))

    def empty(self) -> Tensor:
        """Memory for the bytes of all."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=self.tensors[0].device)

    def _runs(self, flat: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Neighbours of one dtype, and their part of the bytes seen as that dtype."""
        start = 0
        for dtype, group in groupby(self.tensors, lambda x: x.dtype):
            run = list(group)
            end = start + sum(x.nbytes for x in run)
            yield flat[start:end].view(dtype), run
            start = end


def _places(part: Tensor, run: list[Tensor]) -> list[Tensor]:
    """Where each of the tensors lies in the packed part: views, made in one call."""
    return list(_unflatten_dense_tensors(part, run))


def buckets(tensors: Sequence[Tensor], limit: int) -> list[Bucket]:
    """Share the tensors out over buckets of at most ``limit`` bytes, a device at a time.

    Those that are larger are alone in theirs; those without elements are in none. Wide dtypes go
    first, so that each begins where its elements may begin (test_mixed_dtypes_leave_no_gaps).
    """
    kinds: defaultdict[tuple[torch.device, torch.dtype], list[tuple[Tensor, int]]]
    kinds = defaultdict(list)
    looks = map(attrgetter("device", "dtype"), tensors)
    for x, look, nbytes in zip(tensors, looks, map(attrgetter("nbytes"), tensors), strict=True):
        if nbytes:
            kinds[look].append((x, nbytes))
    found = []
    for device in dict.fromkeys(device for device, _ in kinds):
        held: list[Tensor] = []
        total = 0
        dtypes = [dtype for other, dtype in kinds if other == device]
        for dtype in sorted(dtypes, key=lambda dtype: (-dtype.itemsize, str(dtype))):
            for x, nbytes in kinds[device, dtype]:
                if held and total + nbytes > limit:
                    found.append(Bucket(tuple(held), total))
                    held, total = [], 0
                held.append(x)
                total += nbytes
        found.append(Bucket(tuple(held), total))
    return found
