"""What a recorder writes for calls of any order, size and thread, without ranks."""

import random
import threading

import pytest
import torch

from allgrad._wire import recorder as recorders
from allgrad._wire.algorithms import Algorithm, Choice
from allgrad._wire.calls import Call
from allgrad._wire.recorder import Recorder
from allgrad.report.findings import find
from allgrad.report.load import load

GIB = 1 << 30


class Alone:
    """As much of a group as a recorder reads."""

    name, members, rank = "0", (0, 1), 0


GROUP = Alone()


def choice_of(operation, sizes=(0, 0, False), received=8):
    def run(call, x):
        return x.new_empty(received)

    return Choice(operation, Algorithm("star", run, bool, bool), *sizes)


def call_at(line):
    return Call(GROUP, 0, 2, "all_gather", site=f"train.py:{line}")


def piece(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def test_every_call_gets_its_own_kind_whatever_came_before(tmp_path):
    """The kind that followed last time is tried first; another must not be taken for it."""
    recorder, order = Recorder(tmp_path, 4096), random.Random(0)
    choices = [choice_of(name, (8, 8, True)) for name in ("all_gather", "broadcast")]
    kept = [call_at(line) for line in range(3)]
    expected = []

    def some(number, backward=False):
        for _ in range(number):
            choice, line, root = order.choice(choices), order.randrange(3), order.randrange(2)
            call = kept[line] if order.random() < 0.5 else call_at(line)  # made anew, or not
            recorder.record(choice, root, call, piece(8), ())
            expected.append((choice.operation, f"train.py:{line}", root, backward))

    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: some(20, backward=True))
    for _ in range(20):
        some(20)
        leaf.sum().backward()
        other = threading.Thread(target=some, args=(20,), name="other")
        other.start()
        other.join()
    recording = load(tmp_path)
    events = recording.ranks[0].events
    found = [recording.kinds[kind] for kind in events.kind]
    assert [(kind.operation, kind.site, kind.root, kind.backward) for kind in found] == expected
    assert events.number.tolist() == list(range(1200))
    threads = [recording.ranks[0].threads[thread] for thread in events.thread]
    assert threads == (["MainThread"] * 40 + ["other"] * 20) * 20


def test_sizes_of_more_than_32_bits(tmp_path):
    recorder = Recorder(tmp_path, 16)
    sizes = [(5 * GIB, 7 * GIB), (3, 4 * GIB), (4 * GIB - 1, 4 * GIB - 1), (5 * GIB, 9), (4, 5)]
    for sent, received in sizes:
        varying = choice_of("all_to_all", received=received)
        recorder.record(varying, -1, call_at(1), piece(sent), ())
        fixed = choice_of("all_gather", (sent, received, True), received)
        recorder.record(fixed, -1, call_at(1), piece(sent), ())
        begun = recorder.begin("reduce", "star", 0, call_at(1), torch.uint8, True, sent)
        recorder.end(begun, received)
    recording = load(tmp_path)
    events = recording.ranks[0].events
    assert list(zip(events.sent.tolist(), events.received.tolist(), strict=True)) == [
        pair for pair in sizes for _ in range(3)
    ]
    assert len(recording.kinds) == 3  # sizes tell no calls apart
    assert events.number.tolist() == list(range(15))


def test_a_call_in_a_place_of_the_ring_that_was_used_before_has_not_ended(tmp_path):
    recorder = Recorder(tmp_path, 2)
    fixed = choice_of("all_gather", (8, 8, True))
    for _ in range(2):
        recorder.record(fixed, -1, call_at(1), piece(8), ())
    with pytest.raises(RuntimeError, match="no memory"):
        recorder.record(failing(), -1, call_at(2), piece(8), ())
    recorder.record(fixed, -1, call_at(1), piece(8), ())
    recorder.begin(
        "reduce", "star", 0, call_at(1), torch.uint8, True, 8
    )  # where the failed one was
    own = load(tmp_path).ranks[0]
    assert own.events.number.tolist() == [3, 4]
    assert (own.events.end > 0).tolist() == [True, False]
    assert not own.events.failed.any()


def failing():
    def run(call, x):
        raise RuntimeError("no memory")

    return Choice("all_gather", Algorithm("star", run, bool, bool), 8, 8, True)


def test_numbers_of_calls_begin_again(tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "_LOW", 3)  # as if a number had two bits
    recorder = Recorder(tmp_path, 16)
    for _ in range(6):
        recorder.record(choice_of("all_gather", (8, 8, True)), -1, call_at(1), piece(8), ())
    assert load(tmp_path).ranks[0].events.number.tolist() == [0, 1, 2, 3, 0, 1]


def test_a_rank_in_two_groups_has_no_larger_piece(tmp_path, monkeypatch):
    """One line reduces in the group of ranks 0 and 1, and in that of ranks 1 and 2."""
    groups = Alone(), Alone()
    groups[0].members, groups[1].members = (0, 1), (1, 2)
    fixed = choice_of("all_reduce", (8, 8, True))
    for rank in range(3):
        monkeypatch.setattr(recorders, "world_rank", lambda rank=rank: rank)
        monkeypatch.setattr(recorders, "world_size", lambda: 3)
        recorder = Recorder(tmp_path, 8)
        for group in groups:
            if rank in group.members:
                call = Call(group, 0, 2, "all_reduce", site="train.py:1")
                recorder.record(fixed, -1, call, piece(8), ())
    (line,) = find(tmp_path).lines
    assert line.sizes == {0: 8, 1: 8, 2: 8}
    assert line.skew == 1.0


def test_a_disk_that_gets_full_does_not_end_the_job(tmp_path):
    recorder, fixed = Recorder(tmp_path, 8), choice_of("all_gather", (8, 8, True))
    recorder.record(fixed, -1, call_at(1), piece(8), ())
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        recorder._table = full
        with pytest.warns(UserWarning, match="is full: new kinds of calls are not recorded"):
            recorder.record(fixed, -1, call_at(2), piece(8), ())
        recorder.record(fixed, -1, call_at(3), piece(8), ())
    recorder.record(fixed, -1, call_at(1), piece(8), ())
    assert load(tmp_path).ranks[0].events.number.tolist() == [0, 3]


def test_a_disk_without_room_is_left_as_it_was(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorders.os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space left"):
        Recorder(tmp_path, 8).open()
    assert not list(tmp_path.iterdir())
