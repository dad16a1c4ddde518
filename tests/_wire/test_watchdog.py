"""Ranks that bring different tensors to one call raise, without a deadline and without checks."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad._wire import (
    algorithms,
    diagnosis,
    ended_ranks,
    groups,
    primitives,
    wait_spec,
    watchdog,
)
from allgrad._wire.calls import Call
from allgrad.errors import AllgradError
from allgrad.testing import run_ranks
from allgrad.testing.pool import Pool
from allgrad.testing.ranks import run_in

CALLS = {
    "count": lambda odd: ag.all_reduce(torch.ones(3 + odd)),
    "count, large": lambda odd: ag.all_reduce(torch.ones(200_000 + odd)),
    "dtype": lambda odd: ag.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32)),
    "transposed": lambda odd: ag.all_reduce(torch.ones((2, 3) if odd else (3, 2))),
    "reduce": lambda odd: ag.reduce(torch.ones(3 + odd), dst=2),
    "broadcast": lambda odd: ag.broadcast(torch.ones(4 - odd), src=2),
    "reduce_scatter": lambda odd: ag.reduce_scatter(torch.ones(6 * (1 + odd)), sizes="equal"),
    # Of these the odd rank sends nothing: it waits in its next call.
    "empty, all_reduce": lambda odd: ag.all_reduce(torch.ones(0 if odd else 3)),
    "empty, reduce": lambda odd: ag.reduce(torch.ones(0 if odd else 3), dst=2),
    "empty, broadcast": lambda odd: ag.broadcast(torch.ones(0 if odd else 3), src=2),
    "empty, all_gather": lambda odd: ag.all_gather(torch.ones(0 if odd else 3), sizes="equal"),
    "empty, reduce_scatter": lambda odd: ag.reduce_scatter(
        torch.ones(0 if odd else 3), sizes="equal"
    ),
    "empty, all_to_all": lambda odd: ag.all_to_all(torch.ones(0 if odd else 3), send_sizes="equal"),
    "keys": lambda odd: ag.broadcast({"ab"[odd]: torch.ones(3), "c": [torch.ones(2)]}, src=2),
}
# Of two ranks, each of which trusts its own sizes.
SIZES = {
    "all_gather": lambda odd: ag.all_gather(torch.ones(2), sizes=(3, 2) if odd else (2, 3)),
    "reduce_scatter": lambda odd: ag.reduce_scatter(torch.ones(5), sizes=(3 - odd, 2 + odd)),
    "all_to_all, equal": lambda odd: ag.all_to_all(torch.ones(4 + 2 * odd), send_sizes="equal"),
    "all_to_all, more": lambda odd: exchange(2 + odd),
    "all_to_all, less": lambda odd: exchange(2 - odd),
    "all_to_all, nothing": lambda odd: exchange(2 - 2 * odd),
    "all_to_all, repeated": lambda odd: repeat_then_differ(odd),  # noqa: PLW0108
    "shift": lambda odd: ag.shift(torch.ones(2), sizes=(2 - odd, 2)),
    "gather": lambda odd: ag.gather(torch.ones(2 + odd), sizes=(2, 2 + odd)),
    "keys, one rank compiled": lambda odd: compiled_if(odd)({"ab"[odd]: torch.ones(3)}),
    "keys in backward": lambda odd: keys_in_backward({"ab"[odd]: torch.ones(3).requires_grad_()}),
}


def compiled_if(wanted):
    reduce = lambda nest: ag.all_reduce(nest)  # noqa: E731, PLW0108
    return torch.compile(reduce, backend="aot_eager", fullgraph=True) if wanted else reduce


def keys_in_backward(nest):
    sum(y.sum() for y in ag.share(nest).values()).backward()


def exchange(coming):
    sizes = (2, coming) if dist.get_rank() == 0 else (coming, 2)
    return ag.all_to_all(torch.ones(4), send_sizes=(2, 2), recv_sizes=sizes)


def repeat_then_differ(odd):
    """Both ranks bring what all of them have brought before, but not the same."""
    with algorithms.using(all_to_all="repeated"):
        for size in (4, 600, 4, 600, 4, 4 if odd else 600):
            ag.all_to_all(torch.ones(size), send_sizes="equal")


def make_unequal(name):
    try:
        (CALLS if dist.get_world_size() == 3 else SIZES)[name](int(dist.get_rank() == 1))
        # A rank that sent nothing to the odd one, nor waited for it, finds out in its next call.
        return ag.all_reduce(torch.ones(1))
    except AllgradError as error:
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"


@pytest.mark.one_in(3)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("world", "name"), [*((3, name) for name in CALLS), *((2, name) for name in SIZES)]
)
def test_unequal_tensors_never_meet(world, name):
    found = run_ranks(make_unequal, world, name, timeout=30)
    assert all(isinstance(text, str) for text in found), found
    assert any("CollectiveMismatch" in text and "differs" in text for text in found), found
    assert all("different" in text for text in found), found


# A rank whose nest is empty would send nothing, and go on to its next call.
NO_TENSORS = {
    "all_reduce": ag.all_reduce,
    "all_reduce, max": lambda nest: ag.all_reduce(nest, op="max"),
    "all_reduce, started": lambda nest: ag.all_reduce(nest, async_op=True).wait(),
    "all_reduce, compiled": lambda nest: compiled_if(True)(nest),  # noqa: PLW0108
    "broadcast": ag.broadcast,
    "reduce": ag.reduce,
    "scan": ag.scan,
    "all_gather": lambda nest: ag.all_gather(nest, sizes="equal"),
    "reduce_scatter": lambda nest: ag.reduce_scatter(nest, sizes="equal"),
    "all_to_all": lambda nest: ag.all_to_all(nest, send_sizes="equal"),
    "gather": lambda nest: ag.gather(nest, sizes="equal"),
    "shift": lambda nest: ag.shift(nest, sizes="equal"),
    "permute": lambda nest: ag.permute(nest, [(0, 1), (1, 2)], sizes="equal"),
}


def bring_no_tensors(name):
    rank = dist.get_rank()
    ag.all_reduce(torch.ones(1))
    try:
        NO_TENSORS[name]([] if rank == 1 else [torch.ones(3)])
        if rank != 1:  # of broadcast it has its result: it finds out in its next call
            ag.all_reduce(torch.ones(1))
    except AllgradError as error:
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"


@pytest.mark.one_in(3)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", NO_TENSORS)
def test_an_empty_nest_on_one_rank(name):
    found = run_ranks(bring_no_tensors, 3, name, timeout=30)
    assert all(text and "for a nest without tensors" in text for text in found), found


def unused_result(odd):
    """A rank without the second result in its loss goes backward through the first at once."""
    x = torch.ones(3, requires_grad=True)
    first, second = ag.all_reduce(x), ag.all_gather(x, sizes="equal")
    (first.sum() if odd else first.sum() + second.sum()).backward()


def nothing_to_send(odd):
    """Around the whole ring nothing is sent: the rank that shifts first is one call ahead for ever."""
    turns = [
        lambda: ag.gather(torch.ones(1), dst=1, sizes="equal"),
        lambda: ag.shift(torch.ones(1), offset=2, wrap=True, sizes=(1, 1)),
    ]
    for turn in turns[::-1] if odd else turns:
        turn()


DIFFERENT = {
    "src": lambda odd: ag.broadcast(torch.ones(3), src=odd),
    "op": lambda odd: ag.all_reduce(torch.ones(3), op="max" if odd else "sum"),
    "sizes found": lambda odd: (ag.all_gather if odd else ag.all_reduce)(torch.ones(3)),
    "sizes equal": lambda odd: (
        ag.all_gather(torch.ones(3), sizes="equal") if odd else ag.all_reduce(torch.ones(3))
    ),
    "nothing to send": nothing_to_send,
    "backward": unused_result,
}


def make_different(name, lockstep):
    try:
        with ag.lockstep() if lockstep else contextlib.nullcontext():
            DIFFERENT[name](dist.get_rank())
    except AllgradError as error:
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"


def cross_with_empty_pieces():
    """One rank scatters in a second backward, the other gathers in a first: all pieces are empty."""
    x = torch.empty(0, 3, requires_grad=True)
    first, second = (ag.scatter(x * x, src=0, sizes=(0, 0)) for _ in range(2))
    w = torch.ones_like(first).requires_grad_()
    (gradient,) = torch.autograd.grad((first * w).sum(), x, create_graph=True)
    try:
        if dist.get_rank():
            second.sum().backward()
        else:
            gradient.sum().backward(inputs=[w])
    except AllgradError as error:
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"


@pytest.mark.timeout(60)
def test_crossing_with_empty_pieces_does_not_wait_for_ever():
    found = run_ranks(cross_with_empty_pieces, 2, timeout=30)
    assert all("sending 0, 0 receiving 0, -" in text for text in found), found


@pytest.mark.one_in(3)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "lockstep"),
    [(name, lockstep) for name in DIFFERENT for lockstep in (False, True)][:-1],
)
def test_ranks_in_different_calls_do_not_wait_for_ever(name, lockstep):
    found = run_ranks(make_different, 2, name, lockstep, timeout=30)
    assert all("wait for each other in different calls" in text for text in found), found


def come_late_with_ragged_pieces():
    """Ranks that wait for a late one bring pieces of their own lengths: nothing is wrong."""
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(3.5)
    x = torch.full((rank + 1,), float(rank), requires_grad=True)
    y = ag.all_gather(x, sizes=(1, 2, 3))
    ag.reduce_scatter(y * y, sizes=(1, 2, 3)).sum().backward()
    return y.tolist(), x.grad.tolist()


def test_ragged_pieces_are_no_mismatch():
    found = run_ranks(come_late_with_ragged_pieces, 3, timeout=30)
    assert [y for y, _ in found] == [[0.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 3
    assert [g for _, g in found] == [[0.0], [6.0] * 2, [12.0] * 3]


def come_late_to_every_algorithm(late):
    """The watchdog looks twenty times a second, and one rank comes late to every call."""
    usual, watchdog._LOOK_EVERY = watchdog._LOOK_EVERY, 0.05
    rank, x = dist.get_rank(), torch.ones(6)
    ag.all_reduce(x)
    time.sleep(1)  # the last look of the old kind
    calls = {
        "all_gather": lambda: ag.all_gather(torch.ones(2), sizes="equal"),
        "reduce_scatter": lambda: ag.reduce_scatter(x, sizes="equal"),
        "all_reduce": lambda: ag.all_reduce(x),
        "broadcast": lambda: ag.broadcast(x, 1),
        "reduce": lambda: ag.reduce(x, 1),
        "all_to_all": lambda: ag.all_to_all(x, send_sizes="equal"),
    }
    found = []
    for operation, entries in algorithms.TABLE.items():
        for entry in entries:
            if rank == late:
                time.sleep(0.3)
            with algorithms.using(**{operation: entry.name}):
                found.append(calls[operation]().sum().item())
    watchdog._LOOK_EVERY = usual
    return found


@pytest.mark.one_in(3)
@pytest.mark.timeout(90)
@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_no_mismatch_in_any_algorithm(late):
    found = run_ranks(come_late_to_every_algorithm, 3, late, timeout=80)
    assert all(len(by_rank) == sum(map(len, algorithms.TABLE.values())) for by_rank in found)


@pytest.mark.ranks(3)
def test_late_between_checks(rank, world):
    """Rank 2 is late after the ranks agreed: rank 1 waits for it, rank 0 for the next agreement."""
    x, run = torch.ones(2), primitives._run
    ag.all_reduce(x)
    with ag.checked(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "_LOOK_EVERY", 0.05)
        time.sleep(1)  # the last look of the old kind
        if rank == 2:
            patch.setattr(primitives, "_run", lambda *given: time.sleep(1) or run(*given))
        ag.shift(x, sizes="equal", wrap=False)
        assert ag.all_reduce(x).tolist() == [3.0, 3.0]


def cross(kind):
    watchdog._LOOK_EVERY, ended_ranks._GRACE = 0.2, 0.5  # of the ranks of this test alone
    rank, of_all = dist.get_rank(), dist.group.WORLD
    pool = ThreadPoolExecutor(1)  # a thread that has nothing to do, and does not come
    pool.submit(int).result()
    members = {"pair": [0, 1], "side": [1, 2], "ends": [0, 2]}
    groups = {"world": of_all} | {name: dist.new_group(ranks) for name, ranks in members.items()}
    mine = {"world", *(name for name, ranks in members.items() if rank in ranks)}
    x = torch.ones(3, requires_grad=True)
    for name, group in groups.items():
        if name in mine:
            ag.all_reduce(x, group=group)
    try:
        if rank == 1 and kind == "late":
            time.sleep(1.5)  # both wait for rank 1, nobody for each other
        order = ["world", "pair"] if rank == 0 or kind == "late" else ["pair", "world"]
        if kind == "third":  # rank 2 waits for rank 1, in a group without rank 0
            order = [*order, "side"] if rank < 2 else ["side", "world"]
        if kind == "circle":  # each waits for the next one
            order = [["pair", "ends"], ["side", "pair"], ["ends", "side"]][rank]
        for name in order:
            if name in mine:
                y = ag.all_reduce(x, group=groups[name])
                y = ag.all_gather(y, sizes="equal", group=groups[name])
        return y.tolist()
    except AllgradError as error:
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"


@pytest.mark.timeout(90)
def test_calls_of_two_groups_in_another_order_do_not_wait_for_ever():
    # Ranks of its own: threads of other tests stay in those of the pool, and one might still come.
    ranks = Pool()
    try:
        found = run_in(ranks, cross, 3, ("crossed",), "gloo", 40)
        circle = run_in(ranks, cross, 3, ("circle",), "gloo", 40)
        third = run_in(ranks, cross, 3, ("third",), "gloo", 40)
        late = run_in(ranks, cross, 3, ("late",), "gloo", 40)
    finally:
        ranks.close()
    for texts in (found, third, circle):
        assert all("wait for each other in calls of different groups" in t for t in texts), texts
    assert all(isinstance(value, list) for value in late), late


class NewestFirst(list):
    """The groups in the worst of the orders that a set may have: those of a former world come last."""

    def add(self, group):
        self.insert(0, group)


def cross_in_a_second_world():
    """Whose groups have the names of those before; the program still holds these, and made more calls."""
    groups.LIVE = ended_ranks.LIVE = NewestFirst()  # of the ranks of this test alone
    rank, store = dist.get_rank(), dist.group.WORLD.get_group_store()
    made = [dist.group.WORLD, *map(dist.new_group, ([0, 1], [1, 2], [0, 2]))]
    held = [group for group in made if isinstance(group, dist.ProcessGroup)]
    for group in held * 3:
        ag.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=3)
    assert held[0].group_name == dist.group.WORLD.group_name
    return cross("crossed")


@pytest.mark.timeout(90)
def test_calls_of_a_former_world_are_not_taken_for_those_of_this_one():
    ranks = Pool()
    try:
        found = run_in(ranks, cross_in_a_second_world, 3, (), "gloo", 30)
    finally:
        ranks.close()
    assert all("wait for each other in calls of different groups" in t for t in found), found


def differ_behind_other_calls():
    """The async call's tensors differ; this thread makes calls of another group, then waits for it."""
    rank, group = dist.get_rank(), dist.new_group()
    ag.all_reduce(torch.ones(1), group=group)
    ag.all_reduce(torch.ones(1))
    pending = ag.all_reduce(torch.ones(2 + (rank == 1)), group=group, async_op=True)
    for _ in range(40):
        ag.all_reduce(torch.ones(1))
        time.sleep(0.1)  # the calls of the world go on meanwhile, and nothing is wrong with them
    try:
        pending.wait()
    except AllgradError as error:
        return f"{type(error).__name__}: {error}", ag.all_reduce(torch.ones(1)).item()


@pytest.mark.timeout(60)
def test_a_mismatch_is_found_while_other_threads_make_calls():
    found = run_ranks(differ_behind_other_calls, 3, timeout=40)
    assert all("the ranks bring different tensors to one call" in text for text, _ in found), found
    assert [value for _, value in found] == [3.0] * 3


def look_at(wait, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        watchdog._compare(wait, alone=False)
        time.sleep(0.02)


@pytest.mark.ranks(3)
def test_a_wait_that_is_over_is_not_compared(rank, world):
    """The watchdog comes to it when its rank is in the next call, which has another number and shape."""
    over = primitives.resolve("all_reduce", None), torch.ones(2), time.monotonic()
    ag.all_reduce(torch.ones(2))
    with ThreadPoolExecutor(1) as pool:
        if rank == 0:
            pool.submit(look_at, over, 3.5)
        time.sleep(4 * (rank == 2))
        assert ag.broadcast(torch.ones(3), src=2).tolist() == [1, 1, 1]


class Waiting(groups.Group):
    """A group whose ranks meet in a store alone; this one is about to wait in the group's first call."""

    __slots__ = ("store",)
    members = range(3)

    def __init__(self, store, rank, name):
        super().__init__(None, rank, 3)
        self.store, self.calls, self.doing = store, 1, (name, -1)
        self.waiting = Call(self, rank, 3, name), torch.ones(2), time.monotonic()
        diagnosis.register(self.waiting[0])

    @property
    def process_group(self):
        return self

    def get_group_store(self):
        return self.store


@pytest.fixture
def found(monkeypatch):
    """What the watchdogs of ranks in this process find."""
    ended = []
    monkeypatch.setattr(watchdog, "_end", lambda call, error: ended.append(f"{call.rank}: {error}"))
    return ended


def test_waits_of_a_former_world_are_not_compared(found):
    store = dist.HashStore()  # as that of a launcher, in which a later world finds what was written
    for rank in (1, 2):
        watchdog._compare(Waiting(store, rank, "all_reduce").waiting, alone=False)
    now = Waiting(store, 0, "all_gather").waiting  # the others have not come yet
    watchdog._compare(now, alone=False)
    assert not found
    come = Waiting(store, 2, "all_reduce").waiting
    for wait in (now, come, now):  # as long as a rank waits, it looks, and writes again
        watchdog._compare(wait, alone=False)
    assert [text.partition("\n")[0] for text in found] == [
        "2: all_reduce: the ranks wait for each other in different calls.",
        "0: all_gather: the ranks wait for each other in different calls.",
    ]


def test_a_wait_that_ended_is_not_written(found, monkeypatch):
    """The rank is in its next call when its wait is described: others would take the one for the other."""
    store, describe = dist.HashStore(), wait_spec.describe
    group = Waiting(store, 1, "all_reduce")
    ended = group.waiting

    def come_to_the_next_call(*about):
        group.calls, group.waiting = 2, None
        return describe(*about)

    monkeypatch.setattr(wait_spec, "describe", come_to_the_next_call)
    watchdog._compare(ended, alone=False)
    monkeypatch.undo()
    other = Waiting(store, 0, "all_gather")
    other.calls = 2
    watchdog._compare(other.waiting, alone=False)
    assert not store.check(["allgrad/waits/1"])
    assert not found
