"""Exchanges of equal blocks that a loop repeats: the backend's own call, where it is known to be safe.

Gloo's all_to_all posts all of its messages in one call, for half of the processor time of messages that
are posted one by one. But it ends the process where a rank sends more than another expects. So the first time
an exchange goes by ``pairwise``, whose messages carry their size: it completes only if every rank brought
the same. From then on each rank knows what followed which exchange:

    rank 0   A  B  A  B       after A comes B, after B comes A: on every rank, for all of them
    rank 1   A  B  A  B       have completed the same exchanges

An exchange that is the known successor of the one before goes by the backend. A rank that brings another
one goes by ``pairwise``, meets nobody, and the watchdog ends the wait: two ranks never bring different
sizes to the backend (test_unequal_tensors_never_meet). This holds for equal blocks only:
of unequal ones, some ranks' sizes may change while others' stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad._wire import eager, pairwise

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad._wire.wait_spec import Peers

__all__ = ["all_to_all"]

_MOST = 1024  # successors; all ranks forget them at the same exchange


def all_to_all(  # noqa: PLR0917
    call: Call,
    x: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    equal: bool = False,
    peers: Peers = None,
) -> Tensor:
    """Equal block ``r`` of ``x`` to rank ``r``: by the backend if this exchange repeats an earlier one."""
    if not equal:
        return pairwise.all_to_all_receives_first(call, x, send, receive, equal, peers)
    group = call.group
    last, successors = group.last_exchange, group.successors
    this: Hashable = x.dtype, x.numel(), call.nest
    if successors.get(last) == this:
        out = eager.all_to_all_equal(call, x, alike=x)
    else:
        out = pairwise.all_to_all_receives_first(call, x, send, receive, equal)
        if len(successors) >= _MOST:
            successors.clear()
        successors[last] = this
    group.last_exchange = this
    return out
