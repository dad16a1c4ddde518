"""One order of backward on every rank: the reverse order of the calls.

Of all nodes that are ready, autograd runs the one with the highest sequence number. While one thread
makes every node, that is the reverse order of the program, whatever a rank computes in between. But
each thread counts its own nodes, and a second derivative on a GPU is recorded by autograd's own
thread. Then the order depends on how many nodes a rank has made before, and two ranks may run two
calls in opposite order.

So once a second thread takes part, and always on a GPU, a call gets two nodes:

    forward    x --- call --- gate --- y
    backward   X --- call <-- gate <-- Y      the gate runs when Y is there

The number of the call is below those of all computations, and higher for later calls. So it runs
when nothing but calls is ready; then the last of those still to come is ready, and is the one that
runs. A gate whose call is that one lets it run at once, so that no memory is held longer than
needed.

Numbers below those of all computations do not exist where a thread has made few nodes. A call that
would run before a later one raises, and the other ranks of the group raise too.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import ref

import torch

from allgrad._core.torch_internals import (
    FakeTensor,
    below_view_tracking,
    functorch_active,
    graph_task,
    is_view,
    node_class,
    nodes_made,
    sequence_number_of,
    set_sequence_number,
    will_run,
)
from allgrad._wire import consistency, deadline, diagnosis, ended_ranks
from allgrad._wire.groups import Backend
from allgrad.errors import CollectiveMismatch

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad._wire.groups import Group

__all__ = ["STATE", "THREAD", "check", "gate", "move", "ordered", "register"]

T = TypeVar("T", bound=type[torch.autograd.Function])

_RESERVED = 2048  # numbers for calls, which no computation should have
_AT_ONCE = 1 << 63
_ANY = 1 << 62
_MOST_TASKS = 64


class _Thread(local):
    """What tells threads apart: numbers of those that have ended are used again
    (test_threads_one_after_the_other_are_several).
    """

    def __init__(self) -> None:
        self.token = object()


THREAD = _Thread()


class _State:
    """All calls that may still go backward."""

    def __init__(self) -> None:
        self.gated = False
        self.thread: object = None  # that made the first of all calls
        self.nodes: list[ref[Any]] = []  # of calls with a number, in their order
        self.look_at = 256  # so many, before the dead ones are dropped
        self.since = -1  # the backward pass in which gates began
        self.numbers = itertools.count(1)  # of calls, with gates
        self.first = self.last = 1  # the numbers of the oldest call and of the newest
        # Devices whose thread leaves the low numbers to calls.
        self.reserved: set[torch.device] = {torch.device("cpu")}
        self.to_come: dict[int, list[_Key]] = {}  # in each backward pass, the last call last


class _Key(NamedTuple):
    """A call among those of a backward pass."""

    number: int
    order: int
    name: str


STATE = _State()


class Order:
    """The calls that meet each other: those of one group over one backend."""

    __slots__ = ("before", "name", "number", "task", "thread")

    def __init__(self) -> None:
        """No call so far."""
        self.thread = THREAD.token  # that made the calls
        self.task = -1  # the backward pass that ran last,
        self.number, self.name = _ANY, ""  # the node it came to,
        self.before = -1, _ANY, ""  # and the same of the pass before

    def enter(self, task: int) -> None:
        """Go on with another backward pass; one may run inside another."""
        before, self.before = self.before, (self.task, self.number, self.name)
        if before[0] == task:
            self.task, self.number, self.name = before
        else:
            self.task, self.number, self.name = task, _ANY, ""


def register(ctx: Any, call: Call, x: Tensor) -> None:
    """Give the node of a differentiable call of ``x`` its place in the order."""
    group = call.group
    device, here = x.device, THREAD.token
    if group.thread is here and x.is_cpu and not STATE.gated:
        return  # one thread: autograd's own number is its place
    order = group.orders.get(device) or _order_of(group, x)
    if STATE.thread is None:
        STATE.thread = here
    # A thread with a group of its own counts too: the calls of two groups may wait for each other.
    several = order.thread is not here or STATE.thread is not here
    if not STATE.gated and (several or (device in group.orders and not x.is_cpu)):
        _start_gates(ctx)
    if order.thread is not here:
        order.thread = here
        _reserve_numbers()
    if not STATE.gated:
        return
    if device not in STATE.reserved and device in group.orders:
        _reserve_numbers_on(device)
    if STATE.nodes and (STATE.nodes[-1]() is None or len(STATE.nodes) > STATE.look_at):
        STATE.nodes[:] = map(ref, _alive())
        STATE.look_at = 2 * len(STATE.nodes) + 256
    if STATE.last - STATE.first > _RESERVED // 2 and graph_task() == -1:
        _number_anew()
    _number(ctx, call, order)


def _number(node: Any, call: Call, order: Order) -> None:
    node.call, node.order, node.number = call, order, next(STATE.numbers)
    STATE.last = node.number
    if not STATE.nodes:
        STATE.first = node.number
    set_sequence_number(node, node.number - STATE.first)
    STATE.nodes.append(ref(node))


def _number_anew() -> None:
    """Number the calls that are left from 1 on. One whose graph is kept for long would let the others grow
    into the numbers of computations (test_a_graph_that_is_kept_leaves_calls_their_numbers).
    """
    nodes = _alive()
    STATE.numbers = itertools.count(1)
    STATE.nodes.clear()
    STATE.to_come.clear()
    for node in nodes:
        with contextlib.suppress(RuntimeError):  # another thread has freed its graph
            _number(node, node.call, node.order)


def _order_of(group: Group, x: Tensor) -> Order:
    if x.is_meta or isinstance(x, FakeTensor):
        return Order()  # nothing is sent
    kind = group.backend(x.device)
    same = (order for device, order in group.orders.items() if group.backend(device) is kind)
    group.orders[x.device] = order = next(same, None) or Order()
    if x.is_cpu:
        group.order, group.thread = order, order.thread
    return order


def _alive() -> list[Any]:
    return [node for found in STATE.nodes if (node := found()) is not None]


def _start_gates(ctx: Any) -> None:
    """From this call on calls get a gate; those made before only get their low number."""
    _reserve_numbers()
    task = graph_task()
    # Kept nowhere before: that would cost every call more than all the rest of this file does.
    found = [node for node in gc.get_objects() if type(node) in _NODES and node is not ctx]
    nodes = [node for node in found if _call_of(node) and _is_alive(node)]
    nodes.sort(key=sequence_number_of)
    to_come = []
    for node in nodes:
        order = _call_of(node).group.order or Order()
        number = sequence_number_of(node)
        try:
            _number(node, _call_of(node), order)
        except RuntimeError:  # another thread has freed its graph since it was found
            continue
        if task != -1 and will_run(node):
            has_run = order.task == task and number >= order.number
            to_come += [] if has_run else [node]
    STATE.to_come[task] = [_key(node) for node in to_come]
    STATE.gated, STATE.since = True, task


def _is_alive(node: Any) -> bool:
    """Tell whether its graph is there: what is left of a node has no number."""
    try:
        return sequence_number_of(node) >= 0
    except RuntimeError:
        return False


_NODES: set[type] = set()


def ordered(function: T) -> T:
    """Mark an autograd.Function whose nodes are registered; ctx has the pair, or the call."""
    _NODES.add(node_class(function))
    return function


def _call_of(node: Any) -> Any:
    pair = getattr(node, "pair", None)
    return getattr(node, "call", None) if pair is None else pair.call


def _key(node: Any) -> _Key:
    return _Key(node.number, id(node.order), node.call.name)


def _reserve_numbers() -> None:
    """Let this thread use up the numbers that calls take."""
    if functorch_active():
        return  # nothing can require grad here
    with torch.enable_grad():
        x = torch.empty(0, device="cpu", requires_grad=True)
        while nodes_made() < _RESERVED:
            x.view(0)


class _Reserve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        _reserve_numbers()
        return x


def _reserve_numbers_on(device: torch.device) -> None:
    """The same in the thread in which autograd works for a device."""
    if functorch_active():
        return
    STATE.reserved.add(device)
    with torch.enable_grad():
        x = torch.zeros(1, device=device, requires_grad=True)
        torch.autograd.grad(_Reserve.apply(x), x)  # type: ignore[no-untyped-call]


def gate(ys: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of a registered call, behind a gate."""
    gated: tuple[Tensor, ...] = _apply_gate(ys[0].grad_fn, *ys)  # type: ignore[no-untyped-call]
    return gated


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: Any, *ys: Tensor) -> tuple[Tensor, ...]:
        ctx.node = node
        ctx.set_materialize_grads(False)
        # Not as views, which could not be changed in place; what is a view already stays one.
        with below_view_tracking():
            return tuple([y if is_view(y) else y.detach() for y in ys])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        node = ctx.node
        to_come = _to_come(graph_task())
        is_last = bool(to_come) and to_come[-1].number == node.number
        set_sequence_number(node, _AT_ONCE if is_last else node.number - STATE.first)
        return None, *gradients


# The same as _Gate.apply outside of torch.func, less what that one does in Python.
_apply_gate = super(torch.autograd.Function, _Gate).apply


def move(node: Any, place: int) -> None:
    """Let the node of a call, or its gate, run as if it had been made earlier.

    Not where a thread had made so few nodes then that these numbers are now those of calls.
    """
    if not STATE.gated or place >= _RESERVED:
        set_sequence_number(node, place)


def check(ctx: Any, call: Call) -> None:
    """Raise if this backward pass would run a call before a later one of the same group."""
    task, order = graph_task(), call.group.order
    if STATE.gated:
        _check_with_gates(ctx, task)
        return
    if order is None:
        return  # tensors without memory: nothing is sent
    number = sequence_number_of(ctx)
    if task != order.task:
        order.enter(task)
    if number > order.number:
        _raise(call, f"after {order.name}, which was made before it")
    order.number, order.name = number, call.name


def _check_with_gates(ctx: Any, task: int) -> None:
    if not hasattr(ctx, "number"):
        return  # made inside torch.func before there were gates
    to_come = _to_come(task)
    if to_come and to_come[-1].number == ctx.number:
        to_come.pop()
        return  # most often: the last one has no later ones
    own = _key(ctx)
    later = [key for key in to_come if key.number > own.number and key.order == own.order]
    if later:
        _raise(ctx.call, f"before {later[-1].name}, which was made after it")
    if own in to_come:
        to_come.remove(own)


def _to_come(task: int) -> list[_Key]:
    """The calls that this backward pass has not run yet, the last one last."""
    found = STATE.to_come.get(task)
    if found is None:
        # A pass around the one in which gates began: what it has run already is not known.
        known = task > STATE.since
        nodes = [node for node in _alive() if known and will_run(node)]
        found = STATE.to_come.setdefault(task, sorted(map(_key, nodes)))
        if len(STATE.to_come) > _MOST_TASKS:
            del STATE.to_come[next(iter(STATE.to_come))]
    return found


def _raise(call: Call, other: str) -> None:
    if consistency.is_checking():
        return  # the ranks compare their calls
    error = CollectiveMismatch(
        f"{call.name}: backward came to {call.name} {other}.\n"
        "Autograd's order is not that of the program, because several threads made the graph; "
        "other ranks may run these calls in another order.\n"
        "Make the calls inside a lockstep block."
    )
    diagnosis.publish_failure(error, call.group)
    ended_ranks.publish(error)
    if any(kind is Backend.GLOO for kind in call.group.backends.values()):
        deadline.close_connections(call)
    raise error
