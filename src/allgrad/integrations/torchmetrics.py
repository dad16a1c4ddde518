"""torchmetrics: ``dist_sync_fn``.

Their gather pads unequal states and cuts them again, and keeps the gradient of the own state only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allgrad.collectives.all_gather import all_gather

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.types import GroupLike

__all__ = ["gather_all_tensors"]


def gather_all_tensors(result: Tensor, group: GroupLike = None) -> list[Tensor]:
    """The tensors of all ranks, in rank order, with their exact gradients.

        rank 0   [ a a ]              [ a a ], [ b ], [ c c c ]
        rank 1   [ b ]       --->     [ a a ], [ b ], [ c c c ]
        rank 2   [ c c c ]            [ a a ], [ b ], [ c c c ]

    For ``Metric(dist_sync_fn=gather_all_tensors)``. The tensors may differ in every dimension, and
    in the number of dimensions. Only the numbers of each tensor are sent, without padding.

    Cost: two collectives and two size exchanges forward, one collective backward.
    """
    shape = torch.tensor(result.shape, dtype=torch.int64, device=result.device)
    ndims = torch.tensor([result.ndim], device=result.device)
    counts = all_gather(ndims, sizes="equal", group=group, grad="none").tolist()
    shapes = all_gather(shape, sizes=counts, group=group, grad="none").split(counts)
    sizes = [int(shape.prod()) for shape in shapes]
    joined = all_gather(result.reshape(-1), sizes=sizes, group=group)
    return [x.view(s.tolist()) for x, s in zip(joined.split(sizes), shapes, strict=True)]
