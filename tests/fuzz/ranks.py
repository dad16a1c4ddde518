"""Programs on real ranks, many in one call, and how they differ from the oracle."""

from __future__ import annotations

import importlib
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import func
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import allgrad as ag
from allgrad.testing import RankFailed, RanksStuck, run_ranks
from fuzz import prelude
from fuzz.oracle import Results, run_oracle
from fuzz.program import Program, comms, make_comm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fuzz.program import Writer

TOLERANCE = 1e-9
ROUNDED = {".float()": 1e-4, ".half()": 2e-2, ".bfloat16()": 1e-1}  # gradients only
LIMIT = 20.0  # seconds for a call, and one more for each program in it
COMPILING = 10.0


@dataclass(frozen=True)
class Find:
    """A program that went wrong, and how."""

    program: Program
    how: str


@dataclass(frozen=True)
class Source:
    """What travels to the ranks."""

    name: str
    body: str
    values: tuple[str, ...]
    leaves: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, results: Results, writer: Writer) -> Source:
        leaves = () if program.is_transformed else tuple(x.out for x in program.leaves())
        name = f"<program {program.seed}>"
        return cls(name, writer.body(), tuple(results.values), leaves)


def check(programs: Sequence[Program], limit: float = LIMIT) -> Iterator[Find]:
    """Run programs of one world in one call; after a failure, those it names alone, then the rest."""
    if not programs:
        return
    expected = [run_oracle(program) for program in programs]
    sources = [
        Source.of(program, results, writer)
        for program, (results, writer) in zip(programs, expected, strict=True)
    ]
    world = programs[0].world
    run_ranks(warm_up, world, timeout=180)
    compiled = sum("torch.compile" in source.body for source in sources)
    # Longer than a deadline: the error it ends in says more than a program that is stuck.
    longest = max(program.deadline for program in programs)
    seconds = limit + len(programs) + COMPILING * compiled + longest
    try:
        by_rank = run_ranks(perform, world, sources, timeout=seconds)
    except (RankFailed, RanksStuck) as failure:
        if len(programs) == 1:
            if not cannot_be_ordered(sources, str(failure)):
                yield Find(programs[0], str(failure))
            return
        named = {int(seed) for seed in re.findall(r"<program (\d+)>", str(failure))}
        suspects = [program for program in programs if program.seed in named] or programs
        finds = [find for program in suspects for find in check([program], limit)]
        odd = not cannot_be_ordered(sources, str(failure))
        if (
            not finds
            and odd
            and (isinstance(failure, RankFailed) or stuck(world, sources, 2 * seconds))
        ):
            finds = [Find(suspects[0], f"only after other programs:\n{failure}")]
        yield from finds
        rest = [program for program in programs if program not in suspects]
        yield from check(rest[::2], limit)
        yield from check(rest[1::2], limit)
        return
    for i, (program, (results, _)) in enumerate(zip(programs, expected, strict=True)):
        how = difference(program, results, {r: found[i] for r, found in enumerate(by_rank)})
        if how:
            yield Find(program, how)


def cannot_be_ordered(sources: Sequence[Source], how: str) -> bool:
    """Tell whether ranks say so of calls of several threads, the first such of a process."""
    threads = any("= thread(" in source.body for source in sources)
    return threads and "CollectiveMismatch: " in how


def stuck(world: int, sources: list[Source], seconds: float) -> bool:
    """Tell whether programs do not end in twice their time either: no matter of a busy machine."""
    try:
        run_ranks(perform, world, sources, timeout=seconds)
    except (RankFailed, RanksStuck):
        return True
    return False


def warm_up() -> None:
    """Let a new process import what the first checkpoint would: seconds, on a busy machine a minute."""
    importlib.import_module("torch._dynamo")


def make_groups(world: int) -> dict[str, object]:
    """All groups of a world, made in one order on every rank."""
    made: dict[str, object] = {"dist": dist, "init_device_mesh": init_device_mesh}
    for code in dict.fromkeys(make_comm(name, world) for name in comms(world) if name != "world"):
        exec(code, made)
    return made


def surroundings() -> dict[str, object]:
    """The names that a program finds, made on every rank."""
    warnings.filterwarnings("ignore", message=".*create_graph=True will create a reference cycle")
    names = make_groups(dist.get_world_size()) | vars(prelude)
    return names | {
        "ag": ag,
        "torch": torch,
        "func": func,
        "checkpoint": checkpoint,
        "rank": dist.get_rank(),
    }


def perform(sources: Sequence[Source]) -> list[dict]:
    """Run on a rank: what it holds after each program."""
    names = surroundings()
    return [perform_one(source, dict(names)) for source in sources]


def perform_one(source: Source, names: dict) -> dict:
    torch._dynamo.reset() if "torch.compile" in source.body else None
    exec(compile(source.body, source.name, "exec"), names)
    first = {x: names[x].grad for x in source.leaves}
    second: dict = {}
    if "penalty" in names:
        second, first = first, {}
        for x in source.leaves:
            held = [
                g for y, g in zip(names["leaves"], names["first"], strict=True) if y is names[x]
            ]
            first[x] = held[0] if held else None
    values = {name: names[name] for name in source.values if name in names}
    results = {
        kind: {name: None if x is None else x.detach().clone() for name, x in found.items()}
        for kind, found in (("values", values), ("first", first), ("second", second))
    }
    # Graphs that hold themselves hold checkpointed functions, and these all names: the groups would stay.
    names.clear()
    return results


def difference(program: Program, expected: Results, found: Mapping[int, dict]) -> str:
    """Say where ranks and oracle differ, or nothing."""
    code = str(program.body)
    rounded = max([TOLERANCE, *(limit for cast, limit in ROUNDED.items() if cast in code)])
    lines = []
    # The penalty takes the sine of gradients: one in bfloat16 may be a good part of a period off.
    twice = 3 * rounded if "bfloat16" in code else rounded
    for kind, tolerance in (("values", TOLERANCE), ("first", rounded), ("second", twice)):
        for name, by_rank in getattr(expected, kind).items():
            for rank, want in by_rank.items():
                if rank not in found:
                    continue
                got = found[rank][kind].get(name)
                if not close(got, want, tolerance):
                    what = {"values": "", "first": ".grad", "second": "'s second derivative"}[kind]
                    lines.append(f"rank {rank}: {name}{what} is {show(got)}, expected {show(want)}")
    return "\n".join(lines)


def close(got: torch.Tensor | None, want: torch.Tensor | None, tolerance: float) -> bool:
    """Equal in dtype, shape and value; no gradient at all is the same as zeros."""
    if got is None or want is None:
        some = got if want is None else want
        return some is None or not some.any()
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(got, want)
    finite = want[want.isfinite()]
    scale = max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
    return torch.allclose(got, want, rtol=0, atol=tolerance * scale, equal_nan=True)


def show(x: torch.Tensor | None) -> str:
    if x is None:
        return "None"
    text = str(x.tolist()) if x.numel() <= 12 else f"sum {x.sum().item()}"
    return f"{text} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
