"""``lockstep``: a block whose collectives all take part in backward, on every rank."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from allgrad._autograd.backward_order import Chain
from allgrad._wire import consistency, deadline, diagnosis
from allgrad.errors import InputError, ModeError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

__all__ = ["Step", "lockstep"]


class Step:
    """What a lockstep block hands out: the way to go backward."""

    def __init__(self, chain: Chain) -> None:
        """The step of a block whose collectives are tied to ``chain``."""
        self._chain = chain

    def tie(self, loss: Tensor) -> Tensor:
        """Tie the block's collectives to a loss, for frameworks that call backward themselves.

        The value stays what it was. Call it on every rank, once the block's collectives are done.
        """
        if not isinstance(loss, Tensor) or not (loss.is_floating_point() or loss.is_complex()):
            raise InputError(f"tie: the loss is {_kind(loss)}.\nGive a floating-point tensor.")
        self._chain.wait_for_pending()
        _, end = self._chain.take_ends()
        return loss + end.sum().to(loss)

    def backward(
        self,
        loss: Tensor | Sequence[Tensor] | None = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Go backward through every collective of the block, on every rank.

            rank 0   step.backward(loss)
            rank 1   step.backward()             has no loss
            rank 2   step.backward([l1, l2])     has two

        The arguments are those of ``torch.autograd.backward``.
        """
        losses = [] if loss is None else [loss] if isinstance(loss, Tensor) else list(loss)
        for one in losses:
            if not isinstance(one, Tensor) or one.numel() != 1:
                raise InputError(f"backward: a loss is {_kind(one)}.\nGive tensors of one element.")
        self._chain.wait_for_pending()  # some ranks may have waited for a call, and others not yet
        keep = retain_graph or create_graph
        start, end = self._chain.ends() if keep else self._chain.take_ends()
        roots = [one for one in losses if one.requires_grad]
        reach = None if inputs is None else [*inputs, start]
        torch.autograd.backward(
            [*roots, end.sum()],
            retain_graph=retain_graph,
            create_graph=create_graph,
            inputs=reach,
        )
        start.grad = None


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


@contextlib.contextmanager
def lockstep() -> Generator[Step]:
    """Make every collective inside take part in backward, in exact reverse order, on every rank.

        with ag.lockstep() as step:          rank 0 uses it       rank 1 does not
            y = ag.all_gather(x)             loss = f(y)          loss = g(x)
        step.backward(loss)                  all_gather's backward runs on both

    A result that was not used gets zeros; a rank without a loss calls ``step.backward()``. Call it
    on every rank, or ``loss = step.tie(loss)`` before a framework's own backward.

    An error inside the block on one rank ends the block on all of them with that rank's message:
    at once when calls are checked and the block has made some, all of one group, which can be used
    after that. Otherwise, and when a call itself was interrupted, within a second, and the group of a
    call that ended so cannot.

    Blocks may be nested and repeated; each goes backward through its own collectives.
    """
    if torch.compiler.is_compiling():
        raise ModeError(
            "lockstep: a block cannot be compiled.\n"
            "Compile what is around its collectives, not the block itself."
        )
    chain = Chain()
    with deadline.listening() as used, chain.recording():
        try:
            yield Step(chain)
            chain.wait_for_pending()
        except GeneratorExit:  # a generator that is closed leaves the block, as by a return
            raise
        except BaseException as error:  # a KeyboardInterrupt, too, leaves other ranks waiting
            calls = [] if diagnosis.is_inside_call(error) else list(used.values())
            if diagnosis.is_known(error):
                pass
            elif consistency.is_checking() and len(calls) == 1:
                consistency.report_failure(calls[0], error)
            else:
                diagnosis.publish_failure(error)
            raise
