"""sentence-transformers: losses with ``gather_across_devices=True``.

Their gather needs equal batches, and its gradient is that of ``torch.distributed.nn``. Cached losses
(gradient caching) send gradients back once, however many mini-batches a rank has.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from allgrad.integrations._gathered_loss import GatheredLoss as _GatheredLoss
from allgrad.integrations._library import needs, replaced
from allgrad.integrations._rows import RowGather

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from types import ModuleType

    from torch import Tensor, nn

with needs("sentence-transformers"):
    from sentence_transformers.util import distributed as their_gathers

__all__ = ["GatheredLoss", "exact_gather"]


@contextmanager
def exact_gather(loss: nn.Module | None = None) -> Iterator[RowGather]:
    """Inside the block their losses gather with ours; ``loss`` is named if it caches gradients.

    The block gives an object whose ``weight`` is to be multiplied with the loss; see ``GatheredLoss``.
    """
    rows = RowGather()

    def all_gather(tensor: Tensor, **_: bool) -> Tensor:
        return rows(tensor)

    with ExitStack() as stack:
        stack.enter_context(replaced(their_gathers, all_gather=all_gather))
        for module in _modules_with_rank():
            stack.enter_context(replaced(module, get_rank=rows.first_row))
        for cached in _cached(loss):
            calculate = rows.cached(cached.calculate_loss)
            stack.enter_context(replaced(cached, calculate_loss=calculate))
        yield rows


def _modules_with_rank() -> list[ModuleType]:
    """The modules of losses that have imported ``get_rank``."""
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith("sentence_transformers.")
        and ".losses." in name
        and hasattr(module, "get_rank")
    ]


def _cached(loss: nn.Module | None) -> list[Any]:
    """The losses with cached gradients in a loss, which call backward for every mini-batch."""
    return [
        part
        for part in ([] if loss is None else loss.modules())
        if getattr(part, "uses_gradient_cache", False) and hasattr(part, "calculate_loss")
    ]


class GatheredLoss(_GatheredLoss):
    __doc__ = _GatheredLoss.__doc__

    def _exact_gather(self) -> AbstractContextManager[RowGather]:
        return exact_gather(self.loss)
