"""Random programs in which one rank raises, exits, is stopped, or is a second late at a random point.

Every rank has to end in time: with the right values, or with an error that ``allgrad.errors`` names.
"""

from __future__ import annotations

import functools
import time
import traceback
from random import Random

from allgrad.errors import AllgradError
from fuzz.coverage import describe
from fuzz.forked import ForkedRanks
from fuzz.generate import generate
from fuzz.misbehave import misbehave
from fuzz.oracle import run_oracle
from fuzz.program import Call, Change, Program
from fuzz.ranks import (
    COMPILING,
    Source,
    cannot_be_ordered,
    difference,
    perform_one,
    surroundings,
)

KINDS = ("raise", "exit", "stop", "late")
NAMED = {"RankLate", "RankLost", "RankRaised", "CollectiveMismatch"}
DEADLINE = 4.0
SLOW = 4  # every rank compiles for the first time
IN_TIME = 20.0  # the deadline, a roll call, and a slow machine
FORWARD = 'if rank == {rank}:\n    misbehave("{kind}")'
BACKWARD = 'if rank == {rank} and {{0}}.requires_grad:\n    {{0}}.register_hook(lambda g: misbehave("{kind}"))'


def faulty(seed: int, *, compiled: bool = False) -> tuple[Program, int, str]:
    """The program of a seed with a fault in it, the rank that has it, and which it is.

    One in four has compiled blocks; with ``compiled`` all.
    """
    compiled |= seed % 4 == 0
    program = generate(seed, compiled=compiled)
    while program.world == 1:
        seed += 1_000_000
        program = generate(seed, compiled=compiled)
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
    deadline = DEADLINE * (random.random() < 0.5)
    checked = random.random() < 0.4
    return program.but(body=body, deadline=deadline, checked=checked), rank, kind


def check_fault(seed: int, *, compiled: bool = False) -> str:
    """How the program of a seed ends otherwise than it should, or nothing."""
    program, rank, kind = faulty(seed, compiled=compiled)
    expected, writer = run_oracle(program)
    source = Source.of(program, expected, writer)
    seconds = IN_TIME + SLOW * COMPILING * source.body.count("torch.compile(")
    ended = _ranks().run(perform_faulty, program.world, (source,), seconds)
    wrong = []
    told = " ".join(f"{how['error']}: {how['text']}" for how in ended.values())
    unordered = cannot_be_ordered([source], told)
    for r, how in ended.items():
        named = unordered and how["error"] in NAMED
        deadline = bool(program.deadline)
        if not (named or ends_well(how["error"], kind, own=r == rank, deadline=deadline)):
            wrong.append(f"rank {r}: {how['error']} {how['text']}")
    exact = {r: how["found"] for r, how in ended.items() if not how["error"]}
    wrong += [difference(program, expected, exact)]
    if not any(wrong):
        return ""
    summary = [f"rank {r}: {e['error'] or 'exact'}, {e['seconds']:.1f} s" for r, e in ended.items()]
    return describe(
        program, "\n".join([f"rank {rank}: {kind}", *filter(None, wrong), "all:", *summary])
    )


@functools.cache
def _ranks() -> ForkedRanks:
    return ForkedRanks()


def ends_well(error: str, kind: str, *, own: bool, deadline: bool) -> bool:
    """Tell whether a rank may end like this; ``own`` where the fault was its own."""
    if not error or (own and (kind == "exit" or error == "Misbehaved")):
        return True
    if kind == "late" or (kind == "stop" and not deadline):
        return deadline and error == "RankLate"  # a busy machine makes a second longer
    return error in NAMED


def perform_faulty(source: Source) -> dict:
    """Run on a rank: how it ended."""
    began = time.monotonic()
    ended: dict = {"error": "", "text": "", "found": {}}
    names = surroundings() | {"misbehave": misbehave}
    try:
        ended["found"] = perform_one(source, names)
    except Exception as error:  # noqa: BLE001
        text = str(error) if isinstance(error, AllgradError) else traceback.format_exc()
        ended |= {"error": type(error).__name__, "text": text}
    return ended | {"seconds": time.monotonic() - began}
