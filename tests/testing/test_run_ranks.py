from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad.errors import AllgradError, InputError
from allgrad.testing import CannotShip, RankFailed, RanksStuck, ranks, run_ranks


def who() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def summed() -> float:
    total = torch.tensor([float(2 ** dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def is_running(pid: int) -> bool:
    """A zombie waits for its parent's attention only; it runs no more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


# What comes back


def test_results_are_in_rank_order() -> None:
    assert run_ranks(who, 3) == [(0, 3), (1, 3), (2, 3)]


def test_arguments_and_closures_reach_every_rank() -> None:
    offset = 10
    add = lambda x, y: offset + x + y + dist.get_rank()  # noqa: E731
    assert run_ranks(add, 2, 100, 1000) == [1110, 1111]


def test_a_function_that_names_an_op() -> None:
    """As the policy of selective checkpointing does."""
    aten, op = torch.ops.aten, torch.ops.aten.addmm.default

    def named() -> list[str]:
        return [str(torch.ops.aten.mm.default), str(aten.bmm.default), str(op)]

    assert (
        run_ranks(named, 2) == [["aten.mm.default", "aten.bmm.default", "aten.addmm.default"]] * 2
    )


def test_ranks_are_connected() -> None:
    assert run_ranks(summed, 3) == [7.0, 7.0, 7.0]


def test_processes_are_reused() -> None:
    pids = run_ranks(os.getpid, 2)
    assert len({*pids, os.getpid()}) == 3
    assert run_ranks(os.getpid, 2) == pids


def test_worlds_share_processes_and_may_alternate() -> None:
    pids = run_ranks(os.getpid, 3)
    for world in (1, 3, 2, 1, 2):
        assert run_ranks(summed, world) == [2.0**world - 1] * world
        assert run_ranks(os.getpid, world) == pids[:world]


def test_default_group_of_torch_functions_is_the_current_world() -> None:
    def pieces() -> int:
        from torch.distributed.nn import functional

        return len(functional.gather(torch.ones(1)))  # without a group

    assert [run_ranks(pieces, world, timeout=30) for world in (2, 3)] == [[2, 2], [3, 3, 3]]


def test_the_caller_has_no_process_group() -> None:
    run_ranks(who, 2)
    assert not dist.is_initialized()


def test_results_leave_their_graph_on_the_rank() -> None:
    def body() -> dict[str, torch.Tensor]:
        leaf = torch.ones(2, requires_grad=True)
        return {"computed": leaf * (1 + dist.get_rank()), "leaf": leaf}

    for rank, result in enumerate(run_ranks(body, 2)):
        assert result["computed"].tolist() == [1.0 + rank] * 2
        assert not result["computed"].requires_grad
        assert result["leaf"].requires_grad


def test_arguments_keep_asking_for_their_gradient() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert run_ranks(lambda x: (x.requires_grad, x.is_leaf), 2, x) == [(True, True)] * 2


def test_ranks_see_the_callers_path_and_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(who, 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("only_here.py").write_text("value = 5\n")

    def body() -> tuple[Path, int]:
        import only_here

        return Path.cwd(), only_here.value

    assert run_ranks(body, 2) == [(tmp_path, 5)] * 2


def test_each_call_begins_with_the_same_state() -> None:
    def spoil() -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True)
        torch.autograd.set_detect_anomaly(True)
        os.environ["ONLY_IN_SPOIL"] = "1"
        np.random.seed(5)  # noqa: NPY002

    def body() -> tuple[Any, ...]:
        strict = torch.are_deterministic_algorithms_enabled() or torch.is_anomaly_enabled()
        modes = torch.get_default_dtype(), torch.is_grad_enabled(), strict
        return torch.rand(()).item(), np.random.rand(), *modes, "ONLY_IN_SPOIL" in os.environ  # noqa: NPY002

    first = run_ranks(body, 2)
    run_ranks(spoil, 2)
    assert run_ranks(body, 2) == first
    assert first[0][0] != first[1][0]
    assert first[0][1] != first[1][1]
    assert first[0][2:] == (torch.float32, True, False, False)


# What a call leaves in its world


@pytest.mark.parametrize(
    "leftover",
    ["group", "destroyed", "own world", "unmatched call", "failed", "late"],
)
def test_leftovers_do_not_reach_the_next_call(leftover: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        if leftover == "group":
            dist.new_group([0])
        elif leftover == "unmatched call":
            if rank == 0:
                dist.all_reduce(torch.full((1,), 100.0), async_op=True)
        elif leftover == "failed":
            ag.all_reduce(torch.ones(2))
            with pytest.raises(AllgradError):
                ag.all_reduce(torch.ones(2 + rank))
        elif leftover == "late":
            time.sleep(2 * rank)
            with ag.deadline(0.5), pytest.raises(AllgradError):
                ag.all_gather(torch.ones(2))
        else:
            dist.destroy_process_group()
            if leftover == "own world":
                store = dist.HashStore()
                dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    run_ranks(body, 2)
    assert run_ranks(who, 2) == [(0, 2), (1, 2)]
    assert run_ranks(summed, 2, timeout=10) == [3.0, 3.0]
    assert run_ranks(lambda: ag.all_reduce(torch.ones(1)).item(), 2, timeout=10) == [2.0, 2.0]
    assert run_ranks(dist.distributed_c10d.get_pg_count, 2) == [1, 1]


# When a rank fails


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the root cause")
    dist.all_reduce(torch.ones(1))


def test_a_failing_rank_releases_the_others() -> None:
    pids = run_ranks(os.getpid, 3)
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(fail_on, 3, 1)
    assert time.monotonic() - began < 1.5  # less than the grace period: nobody had to be killed
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 of 3 failed:"
    assert lines[1] == "Traceback (most recent call last):"
    assert "in fail_on" in lines[2]  # the runner's own frames are not shown
    assert "ValueError: the root cause" in lines
    assert re.match(
        r"rank 0: released \(RuntimeError: .*Connection (closed|reset) by peer", lines[-2]
    )
    assert lines[-1].startswith("rank 2: released (RuntimeError: ")
    assert isinstance(caught.value.__cause__, ValueError)
    assert sorted(caught.value.failures) == [0, 1, 2]
    assert run_ranks(summed, 3) == [7.0, 7.0, 7.0]
    assert run_ranks(os.getpid, 3) == pids


def test_a_group_held_by_the_traceback_does_not_keep_the_others_waiting() -> None:
    def body() -> None:
        group = dist.group.WORLD
        if dist.get_rank() == 0:
            raise ValueError(f"with {group is not None}")
        dist.all_reduce(torch.ones(1), group=group)

    pids = run_ranks(os.getpid, 2)
    with pytest.raises(RankFailed, match="rank 1: released"):
        run_ranks(body, 2)
    assert run_ranks(os.getpid, 2) == pids


def test_ranks_that_finished_say_so() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed:[\s\S]*\nrank 0: finished$"):
        run_ranks(lambda: [time.sleep(0.2), 1 / 0] if dist.get_rank() else None, 2)


def test_a_failure_on_every_rank_shows_each() -> None:
    def body() -> None:
        time.sleep(0.2 * dist.get_rank())
        raise KeyError(dist.get_rank())

    with pytest.raises(RankFailed) as caught:
        run_ranks(body, 2)
    assert str(caught.value).startswith("rank 0 of 2 failed:")
    assert str(caught.value).endswith("\nrank 1: KeyError: 1")


def test_exit_in_a_rank_is_a_failure() -> None:
    with pytest.raises(RankFailed, match="SystemExit: 3"):
        run_ranks(sys.exit, 2, 3)


def test_an_exception_that_cannot_travel_is_still_shown() -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def body() -> None:
        raise Odd(1, 2)

    with pytest.raises(RankFailed, match="Odd: 1 and 2") as caught:
        run_ranks(body, 2)
    assert caught.value.__cause__ is None


def test_a_result_that_cannot_travel_is_named() -> None:
    with pytest.raises(RankFailed, match=r"the result of rank 1 cannot be pickled: .*generator"):
        run_ranks(lambda: (x for x in "ab") if dist.get_rank() else None, 2)
    assert run_ranks(who, 2) == [(0, 2), (1, 2)]


def test_an_argument_that_cannot_travel_raises_here() -> None:
    with pytest.raises(CannotShip, match="cannot be pickled"):
        run_ranks(id, 2, (x for x in "ab"))


@pytest.mark.parametrize("given", [0, 1.5, "2"])
def test_what_is_no_world_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="at least one rank"):
        run_ranks(who, given)


@pytest.mark.parametrize("timeout", [0, float("inf"), float("nan"), None])
def test_what_is_no_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(InputError, match="no seconds from 0"):
        run_ranks(who, 1, timeout=timeout)


def test_an_unknown_backend_is_shown() -> None:
    with pytest.raises(AllgradError, match=r"(?i)unknown backend type nosuch"):
        run_ranks(who, 1, backend="nosuch")


# When a rank dies or does not come back


def test_dead_ranks_are_named_and_replaced() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            ctypes.string_at(0)
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    pids = run_ranks(os.getpid, 3)
    with pytest.raises(RankFailed, match=r"^rank [12] of 3 failed:\nthe process was") as caught:
        run_ranks(body, 3)
    failures = caught.value.failures
    assert failures[0].one_line.startswith("rank 0: released (")
    assert failures[1].summary == "the process was killed by SIGSEGV"
    assert "in string_at" in failures[1].details
    assert failures[2].one_line == "rank 2: the process was killed by SIGKILL"
    after = run_ranks(os.getpid, 3)
    assert after[0] == pids[0]
    assert {*after[1:]}.isdisjoint(pids)


def test_a_rank_that_does_not_notice_a_death_is_killed() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(lambda: os._exit(7) if dist.get_rank() else time.sleep(100), 2)
    assert str(caught.value) == (
        "rank 1 of 2 failed:\nthe process exited with code 7\nrank 0: did not stop, killed"
    )
    assert run_ranks(summed, 2) == [3.0, 3.0]


def test_a_signal_without_a_name_is_told_by_its_number():
    with pytest.raises(RankFailed) as caught:
        run_ranks(lambda: os.kill(os.getpid(), 40) if dist.get_rank() else None, 2)
    assert caught.value.root.summary == "the process was killed by signal 40"


@pytest.mark.parametrize("how", ["closed", "removed"])
def test_a_rank_that_prints_nothing_returns_its_result(how):
    def silence():
        if dist.get_rank() == 1:
            sys.stdout = open(os.devnull, "w") if how == "closed" else None  # noqa: SIM115, PTH123
            if how == "closed":
                sys.stdout.close()
        return dist.get_rank()

    assert run_ranks(silence, 3) == [0, 1, 2]
    assert run_ranks(lambda: sys.stdout is sys.__stdout__, 3) == [True] * 3  # of the next call


def test_a_rank_killed_between_calls_is_replaced() -> None:
    pids = run_ranks(os.getpid, 2)
    os.kill(pids[0], signal.SIGKILL)
    worker = ranks._pool()._workers[0]
    while worker is not None and worker.alive():
        time.sleep(0.01)
    assert run_ranks(summed, 2) == [3.0, 3.0]


def test_stuck_ranks_are_shown_killed_and_replaced() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            time.sleep(100)
        if dist.get_rank() == 2:
            dist.all_reduce(torch.ones(1))

    pids = run_ranks(os.getpid, 3)
    began = time.monotonic()
    with pytest.raises(RanksStuck) as caught:
        run_ranks(body, 3, timeout=0.3)
    assert time.monotonic() - began < 3
    message = str(caught.value)
    assert message.startswith("2 of 3 ranks did not finish within 0.3 s:\nrank 0: finished\n")
    slept, waited = message.split("rank 1: stuck at")[1].split("rank 2: stuck at")
    assert "in body" in slept
    assert "all_reduce" not in slept
    assert "in all_reduce" in waited
    assert "worker.py" not in message
    assert not is_running(pids[1])
    assert not is_running(pids[2])
    assert run_ranks(os.getpid, 1) == pids[:1]
    assert run_ranks(summed, 2) == [3.0, 3.0]


# The caller


def test_ranks_end_with_their_caller_even_inside_a_call() -> None:
    script = """
        import os, sys, threading, time
        from allgrad.testing import run_ranks

        def body():
            print(os.getpid(), flush=True)
            time.sleep(300)

        if __name__ == "__main__":  # functions of __main__ travel too, and it is not run again
            print(run_ranks(os.getpid, 1)[0], flush=True)
            threading.Timer(1.0, os._exit, [0]).start()
            run_ranks(body, 1)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        check=True,
        text=True,
        timeout=100,  # the rank holds this pipe open: as long as it lives, run() waits
    )
    first, second = map(int, done.stdout.split())
    assert first == second
    give_up = time.monotonic() + 5
    while is_running(first) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not is_running(first)


def test_a_module_of_main_can_be_compiled_inside_another() -> None:
    script = """
        import torch
        from torch import nn
        from torch.nn import functional as F
        import allgrad as ag
        from allgrad.testing import run_ranks

        class Layer(nn.Module):
            def forward(self, x):
                return F.relu(ag.all_gather(x))

        def body(compiled):
            model = nn.Sequential(Layer())
            if compiled:
                model = torch.compile(model, backend="eager")
            return model(torch.tensor([1.0, -1.0])).tolist()

        if __name__ == "__main__":
            print(run_ranks(body, 2, False) == run_ranks(body, 2, True) == [[1.0, 0.0] * 2] * 2)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        check=False,
        text=True,
        timeout=100,
    )
    assert done.stdout.split() == ["True"], done.stderr
