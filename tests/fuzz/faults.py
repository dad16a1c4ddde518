"""Random programs in which one rank raises, exits, is stopped, or is a second late at a random point.

Every rank has to end in time: with the right values, or with an error that ``allgrad.errors`` names.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from unittest import mock

import torch
import torch.distributed as dist

from allgrad.testing import RankFailed, RanksStuck, ranks, run_ranks
from fuzz.coverage import describe
from fuzz.generate import generate
from fuzz.misbehave import misbehave
from fuzz.oracle import run_oracle
from fuzz.program import Call, Change, Program
from fuzz.ranks import Source, difference, perform_one, surroundings, warm_up

KINDS = ("raise", "exit", "stop", "late")
DEADLINE = 4.0
IN_TIME = 20.0  # the deadline, a roll call, and a slow machine
FORWARD = 'if rank == {rank}:\n    misbehave("{kind}")'
BACKWARD = 'if rank == {rank} and {{0}}.requires_grad:\n    {{0}}.register_hook(lambda g: misbehave("{kind}"))'


def faulty(seed: int) -> tuple[Program, int, str]:
    """The program of a seed with a fault in it, the rank that has it, and which it is."""
    program = generate(seed)
    while program.world == 1:
        seed += 1_000_000
        program = generate(seed)
    random = Random(f"fault {seed}")
    rank, kind = random.randrange(program.world), random.choice(KINDS)
    _, writer = run_oracle(program)
    point = random.randint(1, len(program.body))
    done = [s for s in program.body[:point] if not (isinstance(s, Call) and s.handle)]
    held = {name for s in done for name in getattr(s, "outs", (getattr(s, "out", ""),))}
    env = writer.oracle.env
    names = [n for n in env if n in held and rank in env[n] and env[n][rank].is_floating_point()]
    code = random.choice((FORWARD, BACKWARD)).format(rank=rank, kind=kind)
    body = (*program.body[:point], Change(random.choice(names), code), *program.body[point:])
    deadline = DEADLINE if kind == "stop" or random.random() < 0.5 else 0
    checked = random.random() < 0.4
    return program.but(body=body, deadline=deadline, checked=checked), rank, kind


def check_fault(seed: int) -> str:
    """How the program of a seed ends otherwise than it should, or nothing."""
    program, rank, kind = faulty(seed)
    expected, writer = run_oracle(program)
    source = Source.of(program, expected, writer)
    run_ranks(warm_up, program.world, timeout=180)
    with tempfile.TemporaryDirectory() as folder:
        told = ""
        try:
            with mock.patch.object(ranks, "_GRACE", IN_TIME):  # the others end by themselves
                run_ranks(perform_faulty, program.world, source, folder, timeout=IN_TIME)
        except (RankFailed, RanksStuck) as failure:
            told = str(failure)
        ended = {
            int(file.stem): torch.load(file, weights_only=True)
            for file in Path(folder).glob("*.end")
        }
    wrong = []
    for r in range(program.world):
        how = ended.get(r, {"error": "no end", "text": told})
        if not ends_well(how["error"], kind, own=r == rank, deadline=bool(program.deadline)):
            wrong.append(f"rank {r}: {how['error']} {how['text']}")
    exact = {r: how["found"] for r, how in ended.items() if not how["error"]}
    wrong += [difference(program, expected, exact)]
    summary = [
        f"rank {r}: {how['error'] or 'exact'}, {how['seconds']:.1f} s"
        for r, how in sorted(ended.items())
    ]
    if not any(wrong):
        return ""
    note = "\n".join([f"rank {rank}: {kind}", *filter(None, wrong), "all:", *summary])
    return describe(program, note)


def ends_well(error: str, kind: str, *, own: bool, deadline: bool) -> bool:
    """Tell whether a rank may end like this; ``own`` where the fault was its own."""
    if not error or (own and (kind == "exit" or error == "Misbehaved")):
        return True
    if kind == "late":
        return deadline and error == "RankLate"  # a busy machine makes a second longer
    return error in {"RankLate", "RankLost", "RankRaised", "CollectiveMismatch"}


def perform_faulty(source: Source, folder: str) -> None:
    """Run on a rank; write down how it ended before anything else can happen."""
    began, rank = time.monotonic(), dist.get_rank()
    ended: dict = {"error": "", "text": "", "found": {}}
    names = surroundings() | {"misbehave": misbehave}
    dist.barrier()
    try:
        ended["found"] = perform_one(source, names)
    except Exception as error:  # noqa: BLE001
        ended |= {"error": type(error).__name__, "text": str(error)}
    ended["seconds"] = time.monotonic() - began
    part = Path(folder, f"{rank}.part")
    torch.save(ended, part)
    part.rename(part.with_suffix(".end"))
    if ended["error"]:
        os._exit(3)  # as a program does after an error; its connections close
    dist.destroy_process_group()  # the next program meets in a new world


def hunt(minutes: float | None, programs: int | None, start: int, seed: int | None) -> int:
    """Fault after fault; print the programs that end otherwise than they should."""
    began, wrong, count = time.monotonic(), 0, 0
    seeds = [seed] if seed is not None else range(start, start + (programs or sys.maxsize))
    for one in seeds:
        if minutes and time.monotonic() - began > 60 * minutes:
            break
        found = check_fault(one)
        count += 1
        wrong += bool(found)
        sys.stdout.write(found and f"# fault of seed {one}\n{found}\n")
        if count % 20 == 0:
            sys.stdout.write(f"{count} faults in {time.monotonic() - began:.0f} s, {wrong} wrong\n")
        sys.stdout.flush()
    sys.stdout.write(f"{count} faults in {time.monotonic() - began:.0f} s, {wrong} wrong\n")
    return min(wrong, 1)
