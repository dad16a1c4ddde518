"""Which features of a program met which others, and how often."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING

from fuzz.oracle import run_oracle
from fuzz.program import Block, Change, Leaf, Local, Program, WaitInOrder

if TYPE_CHECKING:
    from collections.abc import Iterable

DTYPES = {".float()": "float32", ".bfloat16()": "bfloat16", ".half()": "float16", "2j": "complex"}
ONE_OF = ("ending: ", "world of ", "fault: ")
LAYOUTS = (".transpose(", "[::2]", "[..., 1:]", ".flip(", ".expand(", ".t()")


class Coverage:
    """Counts programs by the features in them, and by pairs of features."""

    def __init__(self) -> None:
        self.programs = 0
        self.single: Counter[str] = Counter()
        self.pairs: Counter[tuple[str, str]] = Counter()

    def add(self, found: Iterable[str]) -> None:
        """Count one program by its features."""
        found = sorted(found)
        self.programs += 1
        self.single.update(found)
        self.pairs.update(combinations(found, 2))

    def table(self) -> str:
        """Collectives downwards, everything else across; and the pairs that never met."""
        calls = sorted(name for name in self.single if name.startswith("ag."))
        others = sorted(name for name in self.single if not name.startswith("ag."))
        width = max(map(len, calls), default=0)
        lines = [f"{self.programs} programs. Columns:"]
        lines += [f"  {i:>2} {name}: {self.single[name]}" for i, name in enumerate(others)]
        lines.append(" " * width + "".join(f"{i:>6}" for i in range(len(others))))
        for call in calls:
            counts = (self.pairs[min(call, other), max(call, other)] for other in others)
            lines.append(f"{call:<{width}}" + "".join(f"{n:>6}" for n in counts))
        return "\n".join([*lines, *self._rare()])

    def _rare(self) -> list[str]:
        """How often pairs met, and which never did; of two worlds or endings a program has one."""
        pairs = [
            (a, b)
            for a, b in combinations(sorted(self.single), 2)
            if not any(a.startswith(kind) and b.startswith(kind) for kind in ONE_OF)
        ]
        never = [f"  {a} + {b}" for a, b in pairs if not self.pairs[a, b]]
        counts = sorted(self.pairs[pair] for pair in pairs)
        few = sum(0 < n < 10 for n in counts)
        met = len(pairs) - len(never)
        middle = counts[len(counts) // 2] if counts else 0
        line = f"{met} of {len(pairs)} pairs of {len(self.single)} features met, {few} of them fewer than 10 times"
        return [f"{line}, half of them {middle} times or more. Never:", *never[:60]]


def features(program: Program) -> set[str]:
    """What a program has in it, in words."""
    found = {f"world of {program.world}", f"ending: {program.ending}"}
    found |= {name for name in ("lockstep", "checked", "deadline") if getattr(program, name)}
    if len(program.losses) > 1:
        found.add("several losses")
    if any(by is None for loss in program.losses for by in loss):
        found.add("a rank without loss")
    if program.compiled_on:
        found.add("compiled transform")
    for step in program.body:
        if isinstance(step, Leaf):
            found.add(f"numbers: {step.kind}")
            found |= {"empty piece"} if any(0 in shape for shape in step.shapes) else set()
            found |= {"ragged"} if len(set(step.shapes)) > 1 else set()
            found |= set() if all(step.needs_grad) else {"a rank without gradient"}
            found |= {"large"} if len(step.shapes[0]) == 2 and step.shapes[0][1] >= 100 else set()
        elif isinstance(step, Local):
            found |= {name for code, name in DTYPES.items() if code in step.code}
            found |= {"strides"} if any(code in step.code for code in LAYOUTS) else set()
        elif isinstance(step, Change):
            fault = re.search(r'misbehave\("(\w+)"\)', step.code)
            if fault:
                found |= {
                    f"fault: {fault[1]}",
                    "in backward" if "hook" in step.code else "in forward",
                }
            else:
                kinds = {"hook": "hook", "history": "histories by rank"}
                found.add(next((kinds[k] for k in kinds if k in step.code), "in place"))
        elif isinstance(step, Block):
            found |= {step.wrap} | set(step.options.split(", ")) - {""}
            some = step.wrap == "compile" and len(step.compiled_on) < program.world
            found |= {"compiled on some ranks"} if some else set()
        elif isinstance(step, WaitInOrder):
            found.add("waited in another order")
            found |= {"waited without grad"} if step.quiet else set()
            found |= (
                {"waited earlier on some ranks"}
                if len(set(map(frozenset, step.orders))) > 1
                else set()
            )
    for call in program.calls():
        found.add(f"ag.{call.name}")
        found |= {f"{key}={call.options[key]}" for key in ("op", "grad") if key in call.options}
        found |= {"nest"} if call.nest else set()
        found |= {"async"} if call.handle else set()
        found |= {f"sizes {call.sizes}"}
        found.add(
            {"w": "group world", "l": "group mesh", "g": "subgroup"}.get(call.comm[0], "axis")
        )
    return found


def describe(program: Program, note: str = "") -> str:
    """A program as a runnable file."""
    return run_oracle(program)[1].script(note)
