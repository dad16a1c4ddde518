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
of unequal ones, some ranks' sizes may change while others' stay. After an exchange that did not
complete the connections of the group are closed, so that what it left here is of no use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad._wire import eager, pairwise
from allgrad._wire.topology import ONE_HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad._wire.topology import Topology
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
    group = call.group
    first = _first_of(group.topology or ONE_HOST)
    if not equal:
        return first(call, x, send, receive, equal, peers)
    last, successors = group.last_exchange, group.successors
    this: Hashable = x.dtype, x.numel(), call.nest
    # Before it is done: a rank that is interrupted in it has sent its messages, as the others have
    # (test_interrupted_rank_knows_the_same_successors).
    group.last_exchange = this
    if successors.get(last) == this:
        return eager.all_to_all_equal(call, x, alike=x)
    if len(successors) >= _MOST:
        successors.clear()
    successors[last] = this
    return first(call, x, send, receive, equal)


def _first_of(topology: Topology) -> Callable[..., Tensor]:
    """How an exchange goes that nothing is known of: ``situation.receives_first``."""
    announced = len(topology.hosts) > 1 or not topology.crowded
    return pairwise.all_to_all_receives_first if announced else pairwise.all_to_all
