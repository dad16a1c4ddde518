"""From a program that goes wrong to a shorter one that goes wrong in the same way."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from fuzz.oracle import run_oracle
from fuzz.program import Block, Call, Change, Leaf, Local, Program, Wait, WaitInOrder
from fuzz.ranks import ROUNDED, Find, check

if TYPE_CHECKING:
    from collections.abc import Iterator


def minimise(find: Find, seconds: float = 90.0) -> Find:
    """Take away whatever can be taken away, until nothing can or the time is up."""
    until = time.monotonic() + seconds
    kind, progress = kind_of(find.how), True
    while progress:
        progress = False
        for simpler in simplifications(find.program):
            if time.monotonic() > until:
                return find
            if is_rounded(simpler) and normal_leaves(simpler) - normal_leaves(find.program):
                continue  # in lower precision whole numbers alone are exact
            again = try_program(simpler)
            if again is not None and kind_of(again.how) == kind:
                find, progress = again, True
                break
    return find


def try_program(program: Program) -> Find | None:
    """How a program goes wrong; ``None`` for one that does not, or means nothing."""
    try:
        run_oracle(program)[1].body()
        if not is_sound(program):
            return None
    except Exception:  # noqa: BLE001 - a step was taken away that another one needs
        return None
    return next(check([program], limit=4.0), None)


def normal_leaves(program: Program) -> set[str]:
    return {x.out for x in program.leaves() if x.kind == "normal"}


def is_rounded(program: Program) -> bool:
    return any(cast in str(program.body) for cast in ROUNDED)


def is_sound(program: Program) -> bool:
    """Tell whether all ranks go backward through what some go back to: see ``Builder.loss``."""
    if program.lockstep:
        return True
    held = run_oracle(program)[0].values
    above: dict[str, set[str]] = {}
    for step in program.body:
        for out in gives(step):
            above[out] = needs(step).union(*(above.get(n, set()) for n in needs(step)))
    for loss in program.losses:
        names = set(loss[0])
        few = [n for n in names if len(held[n]) < program.world]
        if any((above[n] & set(held)) - names for n in few):
            return False
    return True


def kind_of(how: str) -> str:
    """A difference, ranks that wait for ever, or the error that a rank ended with."""
    if how.startswith("rank") and "expected" in how.partition("\n")[0]:
        return "a wrong value" if "derivative" in how or ".grad" in how else "a wrong result"
    if any(word in how for word in ("did not finish", "SIGABRT", "RankLost")):
        return "the ranks do not meet"
    errors = [line.partition(":")[0] for line in how.splitlines() if "Error: " in line[:60]]
    return errors[0] if errors else how.splitlines()[1]


def simplifications(program: Program) -> Iterator[Program]:
    """Simpler programs, the greatest steps first."""
    if program.world > 1:
        yield from fewer_ranks(program)
    for i in reversed(range(len(program.body))):
        yield without(program, {i})
    for i, step in enumerate(program.body):
        yield from simpler_step(program, i, step)
    yield from simpler_frame(program)


def simpler_frame(program: Program) -> Iterator[Program]:
    for flag in ("checked", "deadline"):
        if getattr(program, flag):
            yield program.but(**{flag: 0})
    if program.ending != "together":
        yield program.but(ending="together")
    for i in range(len(program.losses) if len(program.losses) > 1 else 0):
        yield program.but(losses=program.losses[:i] + program.losses[i + 1 :])
    leaves = {x.out for x in program.leaves()} if not program.lockstep else set()
    for name in sorted({n for loss in program.losses for by in loss for n in by or ()} - leaves):
        yield program.but(losses=rename_losses(program.losses, {name: None}))
    if program.lockstep:
        everything = tuple({n: None for loss in program.losses for by in loss for n in by or ()})
        ending = "together" if program.ending == "tie" else program.ending
        losses = ((everything,) * program.world,)
        yield program.but(lockstep=False, ending=ending, losses=losses)


def fewer_ranks(program: Program) -> Iterator[Program]:
    """The same without the last rank."""
    world = program.world - 1
    body = []
    for step in program.body:
        if isinstance(step, Leaf):
            body.append(replace(step, shapes=step.shapes[:-1], needs_grad=step.needs_grad[:-1]))
        elif isinstance(step, Call) and step.comm not in {"world", "line"}:
            body.append(replace(step, comm="world"))
        else:
            body.append(step)
    losses = tuple(loss[:-1] for loss in program.losses)
    yield program.but(world=world, body=tuple(body), losses=losses)


def simpler_step(program: Program, i: int, step) -> Iterator[Program]:
    for simpler in simpler_forms(step):
        yield put(program, i, simpler)
    if isinstance(step, Local | Call) and not getattr(step, "handle", ""):
        outs = getattr(step, "outs", None) or (step.out,)
        yield rename(without_only(program, i), dict(zip(outs, step.inputs, strict=False)))
    if isinstance(step, Block):
        inner = (*step.body[:-1], replace(step.body[-1], out=step.out))
        yield program.but(body=program.body[:i] + inner + program.body[i + 1 :])
    if isinstance(step, Call) and step.handle:
        waits = {j for j, s in enumerate(program.body) if getattr(s, "handle", "") == step.handle}
        kept = tuple(s for j, s in enumerate(program.body) if j == i or j not in waits)
        yield put(program.but(body=kept), i, replace(step, handle=""))


def simpler_forms(step) -> Iterator:
    if isinstance(step, Leaf):
        if step.kind != "normal":
            yield replace(step, kind="normal")
        if not all(step.needs_grad):
            yield replace(step, needs_grad=(True,) * len(step.needs_grad))
        for dim in range(max(map(len, step.shapes))):
            for size in (1, 2):
                one = tuple((*s[:dim], min(s[dim], size), *s[dim + 1 :]) for s in step.shapes)
                if one != step.shapes:
                    yield replace(step, shapes=one)
            yield replace(step, shapes=tuple((*s[:dim], *s[dim + 1 :]) for s in step.shapes))
    if isinstance(step, Call):
        if step.comm != "world":
            yield replace(step, comm="world")
        if step.sizes != "found":
            yield replace(step, sizes="found")
        for key in ("grad", "exclusive", "op"):
            if key in step.options and step.options[key] != "sum":
                rest = {k: v for k, v in step.args if k != key}
                yield replace(
                    step, args=tuple((rest | ({"op": "sum"} if key == "op" else {})).items())
                )
        if step.nest and not step.handle:
            if len(step.inputs) == 1:
                yield replace(step, nest="")
            elif step.nest != "list":
                yield replace(step, nest="list")
    if isinstance(step, Block):
        for j in range(len(step.body) - 1):
            if isinstance(step.body[j], Local):
                given = {step.body[j].out: step.body[j].inputs[0]}
                rest = step.body[:j] + step.body[j + 1 :]
                yield replace(step, body=tuple(rename_step(s, given) for s in rest))
        if step.wrap == "reentrant":
            yield replace(step, wrap="checkpoint")


# ---------------------------------------------------------------------- editing


def put(program: Program, i: int, step) -> Program:
    return program.but(body=(*program.body[:i], step, *program.body[i + 1 :]))


def without_only(program: Program, i: int) -> Program:
    return program.but(body=program.body[:i] + program.body[i + 1 :])


def without(program: Program, numbers: set[int]) -> Program:
    """Take steps away, and all that needs them."""
    kept, gone = [], set()
    for i, step in enumerate(program.body):
        if i in numbers or gone & needs(step):
            gone |= gives(step)
        else:
            kept.append(step)
    losses = rename_losses(program.losses, dict.fromkeys(gone))
    return program.but(body=tuple(kept), losses=losses)


def needs(step) -> set[str]:
    if isinstance(step, WaitInOrder):
        return set(step.handles)
    names = {getattr(step, "input", ""), getattr(step, "target", "")}
    names |= set(getattr(step, "inputs", ()))
    return (names | ({step.handle} if isinstance(step, Wait) else set())) - {""}


def gives(step) -> set[str]:
    names = set(getattr(step, "outs", ())) | {getattr(step, "out", ""), getattr(step, "handle", "")}
    return names - {""}


def rename(program: Program, names: dict[str, str]) -> Program:
    body = tuple(rename_step(step, names) for step in program.body)
    return program.but(body=body, losses=rename_losses(program.losses, names))


def rename_step(step, names: dict[str, str]):
    if isinstance(step, Call | Local):
        return replace(step, inputs=tuple(names.get(n, n) for n in step.inputs))
    if isinstance(step, Change):
        return replace(step, target=names.get(step.target, step.target))
    if isinstance(step, Block):
        body = tuple(rename_step(inner, names) for inner in step.body)
        return replace(step, input=names.get(step.input, step.input), body=body)
    return step


def rename_losses(losses, names: dict):
    """Losses with other names; a name that becomes ``None`` is left out."""
    return tuple(
        tuple(
            by
            if by is None
            else tuple(dict.fromkeys(names.get(n, n) for n in by if names.get(n, n) is not None))
            for by in loss
        )
        for loss in losses
    )
