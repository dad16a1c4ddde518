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

import itertools
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from allgrad._core.torch_internals import (
    FakeTensor,
    below_view_tracking,
    functorch_active,
    graph_task,
    is_view,
    nodes_made,
    set_sequence_number,
    will_run,
)
from allgrad._wire import consistency, deadline, diagnosis
from allgrad._wire.groups import Backend
from allgrad.errors import CollectiveMismatch

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad._wire.calls import Call
    from allgrad._wire.groups import Group

__all__ = ["STATE", "check", "gate", "register"]

_RESERVED = 2048  # numbers for calls, which no computation should have
_AT_ONCE = 1 << 63
_ANY = 1 << 62
_MOST_TASKS = 64


class _State:
    """All calls that may still go backward."""

    def __init__(self) -> None:
        self.gated = False
        self.first = 1  # the number of the oldest of them
        self.nodes: list[ref[Any]] = []
        self.look_at = 256  # so many, before the dead ones are dropped
        self.numbers = itertools.count(1)
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
        """None so far."""
        self.thread = get_ident()  # that made the calls
        self.task = -1  # the backward pass that ran last,
        self.number, self.name = _ANY, ""  # the call it came to,
        self.before: dict[int, tuple[int, str]] = {}  # and the same of passes around it

    def enter(self, task: int) -> None:
        """Go on with another backward pass; one may run inside another."""
        self.before[self.task] = self.number, self.name
        self.task = task
        self.number, self.name = self.before.pop(task, (_ANY, ""))
        if len(self.before) > _MOST_TASKS:
            del self.before[next(iter(self.before))]


def register(ctx: Any, call: Call, x: Tensor) -> None:
    """Give the node of a differentiable call of ``x`` its place in the order."""
    group, device = call.group, x.device
    ctx.order = order = group.orders.get(device) or _order_of(group, x)
    ctx.call, ctx.number = call, next(STATE.numbers)
    nodes = STATE.nodes
    nodes.append(ref(ctx))
    thread = get_ident()
    if order.thread != thread:
        order.thread = thread
        _start_gates()
    if len(nodes) > STATE.look_at:
        _forget_dead()
        STATE.look_at = 2 * len(nodes) + 256
    if STATE.gated:
        if device not in STATE.reserved and device in group.orders:
            _reserve_numbers_on(device)
        if nodes[len(nodes) - 2]() is None:
            _forget_dead()
        if len(nodes) == 1:
            STATE.first = ctx.number
        set_sequence_number(ctx, ctx.number - STATE.first)


def _order_of(group: Group, x: Tensor) -> Order:
    if x.is_meta or isinstance(x, FakeTensor):
        return Order()  # nothing is sent
    device = x.device
    kind = group.backend(device)
    same = (order for other, order in group.orders.items() if group.backend(other) is kind)
    group.orders[device] = order = next(same, None) or Order()
    if device.type != "cpu":
        _start_gates()
    return order


def _forget_dead() -> None:
    STATE.nodes[:] = [found for found in STATE.nodes if found() is not None]


def _start_gates() -> None:
    """From now on calls get a gate; those made before only get their low number."""
    _reserve_numbers()
    if STATE.gated:
        return
    STATE.gated = True
    _forget_dead()
    nodes = [node for found in STATE.nodes if (node := found()) is not None]
    STATE.first = nodes[0].number if nodes else 1
    for node in nodes:
        set_sequence_number(node, node.number - STATE.first)


def _reserve_numbers() -> None:
    """Let this thread use up the numbers that calls take."""
    if functorch_active():
        return  # nothing can require grad here
    with torch.enable_grad():
        x = torch.empty(0, requires_grad=True)
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
    gated: tuple[Tensor, ...] = _Gate.apply(ys[0].grad_fn, *ys)  # type: ignore[no-untyped-call]
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
        last = _to_come(graph_task())[-1:]
        is_last = bool(last) and last[0].number == node.number
        set_sequence_number(node, _AT_ONCE if is_last else node.number - STATE.first)
        return None, *gradients


def check(ctx: Any) -> None:
    """Raise if this backward pass would run a call before a later one of the same group."""
    task, order, number = graph_task(), ctx.order, ctx.number
    if task != order.task:
        order.enter(task)
    if number > order.number:
        _raise(ctx, f"after {order.name} (call {order.number}), which was made before it")
    order.number, order.name = number, ctx.call.name
    if STATE.gated:
        to_come = _to_come(task)
        later = [key for key in to_come if key.number > number and key.order == id(order)]
        if later:
            _raise(
                ctx, f"before {later[-1].name} (call {later[-1].number}), which was made after it"
            )
        own = _Key(number, id(order), ctx.call.name)
        if own in to_come:
            to_come.remove(own)


def _to_come(task: int) -> list[_Key]:
    """The calls that this backward pass has not run yet, the last one last."""
    found = STATE.to_come.get(task)
    if found is None:
        nodes = [node for one in STATE.nodes if (node := one()) is not None and will_run(node)]
        # Of those that were not checked because there were no gates yet.
        found = [
            _Key(node.number, id(node.order), node.call.name)
            for node in nodes
            if node.order.task != task or node.number < node.order.number
        ]
        found = STATE.to_come.setdefault(task, sorted(found))
        if len(STATE.to_come) > _MOST_TASKS:
            del STATE.to_come[next(iter(STATE.to_come))]
    return found


def _raise(ctx: Any, other: str) -> None:
    if consistency.is_checking():
        return  # the ranks compare their calls
    call = ctx.call
    error = CollectiveMismatch(
        f"{call.name}: backward came to {call.name} (call {ctx.number}) {other}.\n"
        "Autograd's order is not that of the program, because several threads made the graph; "
        "other ranks may run these calls in another order.\n"
        "Make the calls inside a lockstep block."
    )
    diagnosis.publish_failure(error)
    if any(kind is Backend.GLOO for kind in call.group.backends.values()):
        deadline.close_connections(call)
    raise error
