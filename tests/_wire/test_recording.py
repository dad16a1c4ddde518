"""A recording holds every wire call, forward and backward, and outlives the process."""

import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad._wire import calls as wire_calls
from allgrad._wire import observers
from allgrad.errors import InputError
from allgrad.nn import dispatch
from allgrad.report.load import load
from allgrad.testing import run_ranks


def described(recording, rank):
    """The calls of one rank: what ran, whether in backward, bytes in and out."""
    events = recording.rank(rank).events
    return [
        (
            recording.kinds[events.kind[at]].name,
            recording.kinds[events.kind[at]].operation,
            recording.kinds[events.kind[at]].backward,
            int(events.sent[at]),
            int(events.received[at]),
        )
        for at in range(len(events))
    ]


def step():
    x = torch.ones(dist.get_rank() + 1, 2, requires_grad=True)
    ag.all_gather(x, sizes=(1, 2, 3)).sum().backward()


def compiled_step():
    torch.compile(step, backend="eager")()


def record_each_mode(path):
    with ag.recorded(path):
        step()
        handle = ag.all_reduce(torch.ones(4), async_op=True)
        handle.wait()
        compiled_step()
        ag.broadcast(torch.ones(5, dtype=torch.float64), src=1)
    step()  # after the block
    return observers.STATE.recorder is None


def record_dispatch(path):
    x = torch.ones(dist.get_rank() + 1, 2, dtype=torch.float64)
    with ag.recorded(path):
        dispatch(x, torch.zeros(len(x), dtype=torch.int64), experts=3)


def test_tokens_that_travel_with_counts_are_sent_and_received_as_they_are(tmp_path):
    run_ranks(record_dispatch, 3, str(tmp_path))
    recording = load(tmp_path)
    (calls,) = zip(*(described(recording, rank) for rank in range(3)), strict=True)
    assert {call[:3] for call in calls} == {("dispatch", "all_to_all", False)}
    heads = calls[1][4]  # nothing else comes to the second rank
    assert [call[3] - heads for call in calls] == [16, 32, 48]
    assert [call[4] - heads for call in calls] == [96, 0, 0]


def test_every_call_is_recorded_forward_and_backward(tmp_path):
    assert run_ranks(record_each_mode, 3, str(tmp_path)) == [True] * 3
    recording = load(tmp_path)
    for rank in range(3):
        piece = 8 * (rank + 1)
        gathered = ("all_gather", "all_gather", False, piece, 48)
        scattered = ("all_gather", "reduce_scatter", True, 48, piece)
        reduced = ("all_reduce", "all_reduce", False, 16, 16)
        broadcast = ("broadcast", "broadcast", False, 40, 40)
        # The same calls whether a graph was compiled or not.
        expected = [gathered, scattered, reduced, gathered, scattered, broadcast]
        assert described(recording, rank) == expected
        events = recording.rank(rank).events
        assert events.number.tolist() == list(range(6))
        assert (events.end >= events.start).all()
        assert not events.failed.any()
        threads = [recording.rank(rank).threads[one] for one in events.thread.tolist()]
        assert threads[2].startswith("allgrad")
        assert recording.rank(rank).closed > events.end.max()
    sites = {kind.name: kind.site for kind in recording.kinds if not kind.backward}
    lines = Path(__file__).read_text().splitlines()
    for name, site in sites.items():
        file, _, line = site.rpartition(":")
        assert file == __file__
        assert f"ag.{name}(" in lines[int(line) - 1]
    # Backward has the line of the collective, not of loss.backward().
    assert {k.site for k in recording.kinds if k.backward} == {sites["all_gather"]}
    assert {k.root for k in recording.kinds if k.operation == "broadcast"} == {1}


def record_around_the_ring(path):
    with ag.recorded(path, calls=8):
        for length in range(20):
            ag.all_reduce(torch.ones(length + 1), grad="none")
        own = load(Path(path)).rank(dist.get_rank())  # while it is made
        return own.closed, own.events.number.tolist()


def test_the_ring_keeps_the_last_calls(tmp_path):
    assert run_ranks(record_around_the_ring, 2, str(tmp_path)) == [(0, list(range(12, 20)))] * 2
    recording = load(tmp_path)
    assert max(file.stat().st_size for file in tmp_path.iterdir()) < 4096 + 8 * 32 + 1000
    events = recording.rank(1).events
    assert events.number.tolist() == list(range(12, 20))
    assert events.sent.tolist() == [4 * (n + 1) for n in range(12, 20)]
    assert "overwritten" in recording.notes[0]


def test_bad_input_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match="cannot make the directory"), ag.recorded(file):
        pass
    for calls in (0, -1, 1.5, "x"):
        wrong = pytest.raises(InputError, match="is not a number of calls")
        with wrong, ag.recorded(tmp_path, calls=calls):
            pass

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        with ag.recorded(tmp_path):
            return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="recorded: a block cannot be compiled"):
        compiled(torch.ones(1))
    assert observers.STATE.recorder is None


def test_blocks_of_threads_end_in_any_order(tmp_path):
    first, second = ag.recorded(tmp_path / "first"), ag.recorded(tmp_path / "second")
    with contextlib.ExitStack() as ends:
        first.__enter__()
        ends.enter_context(second)
        inner = observers.STATE.recorder
        first.__exit__(None, None, None)
        assert observers.STATE.recorder is inner
    assert observers.STATE.recorder is None
    assert not wire_calls._locating


def test_a_block_inside_another_has_a_directory_of_its_own(tmp_path):
    inside = pytest.raises(InputError, match="already being recorded")
    with ag.recorded(tmp_path), inside, ag.recorded(tmp_path / "." / "x" / ".."):
        pass
    assert observers.STATE.recorder is None


WHOLE_PROGRAM = """
import torch, torch.distributed as dist, allgrad as ag
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
ag.all_reduce(torch.ones(3))
"""


def test_the_environment_records_a_whole_program(tmp_path):
    settings = {**os.environ, "ALLGRAD_RECORD": str(tmp_path), "ALLGRAD_RECORD_CALLS": "10"}
    subprocess.run([sys.executable, "-c", WHOLE_PROGRAM], env=settings, check=True, timeout=100)
    recording = load(tmp_path)
    assert described(recording, 1) == [("all_reduce", "all_reduce", False, 12, 12)]
    assert recording.ranks[0].closed
    assert recording.notes == ["There is no file of rank 0."]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


def profile_and_log():
    handler = Lines()
    observers.LOGGER.addHandler(handler)
    step()  # nobody listens
    observers.LOGGER.setLevel("DEBUG")
    try:
        with torch.profiler.profile() as profile:
            step()
    finally:
        observers.LOGGER.setLevel("NOTSET")
        observers.LOGGER.removeHandler(handler)
    return handler.lines, [event.key for event in profile.key_averages()]


def test_calls_have_names_in_the_profiler_and_the_log():
    for rank, (lines, names) in enumerate(run_ranks(profile_and_log, 3)):
        assert {"allgrad::all_gather", "allgrad::all_gather backward"} <= set(names)
        sent = f"all_gather by star, {8 * (rank + 1)} bytes of float32, rank {rank} of 3 in group "
        assert any(name.startswith(sent) for name in names)
        assert [level for level, _ in lines] == ["DEBUG"] * 4  # begin and end, forward and backward
        begin, end = lines[0][1], lines[1][1]
        assert f"{8 * (rank + 1)} bytes" in begin
        assert f"rank {rank} of 3 in group" in begin
        assert "test_recording.py:" in begin
        assert end.endswith(" ms")
        assert lines[2][1].startswith("all_gather backward: reduce_scatter by")
