"""A random SPMD program as data, and the same program as Python source.

A variable may differ by rank in its shape, and may exist on some ranks only. What the data leaves
open (the sizes by rank of a call) comes from the oracle that ran the program in one process.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from random import Random
from textwrap import indent

from fuzz import misbehave, prelude


@dataclass(frozen=True)
class Leaf:
    """An input of the program."""

    out: str
    shapes: tuple[tuple[int, ...], ...]  # by rank
    kind: str
    needs_grad: tuple[bool, ...]  # by rank
    seed: int


@dataclass(frozen=True)
class Local:
    """A step without communication: Python with ``{0}`` and ``{1}`` for the inputs."""

    out: str
    code: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """A collective of ``allgrad``. With ``handle`` it is started only, and a ``Wait`` follows."""

    outs: tuple[str, ...]
    name: str
    inputs: tuple[str, ...]
    args: tuple[tuple[str, object], ...] = ()
    comm: str = "world"
    sizes: str = "found"  # or "given", "equal"
    cut: int = 0  # seed of the sizes that a caller may choose
    nest: str = ""
    handle: str = ""
    off_src: str = "empty"  # what the other ranks pass to scatter: "empty", "any", "None"

    @property
    def options(self) -> dict:
        return dict(self.args)


@dataclass(frozen=True)
class Wait:
    """The end of a started call."""

    outs: tuple[str, ...]
    handle: str
    nest: str


@dataclass(frozen=True)
class WaitInOrder:
    """Each rank waits for some of the handles, in an order of its own; their results come later."""

    handles: tuple[str, ...]
    orders: tuple[tuple[str, ...], ...]  # by rank
    quiet: bool = False  # without grad


@dataclass(frozen=True)
class Change:
    """A change in place, or a hook: a statement about one variable, without a result."""

    target: str
    code: str


@dataclass(frozen=True)
class Block:
    """Steps in a function of their own: "checkpoint", "reentrant", "thread", "no_grad", or "compile"
    on some ranks.
    """

    out: str
    wrap: str
    input: str
    body: tuple[Local | Call, ...]
    compiled_on: tuple[int, ...] = ()
    options: str = ""  # of torch.compile


@dataclass(frozen=True)
class Program:
    """Steps, and what is differentiated afterwards.

    losses: for each loss, by rank, the variables in it; ``None`` where a rank has none.
    ending: "each" (a backward for each loss), "together" (one for all), "tie", "second", or one of
    ``transforms``.
    """

    seed: int
    world: int
    body: tuple
    losses: tuple[tuple[tuple[str, ...] | None, ...], ...]
    ending: str = "together"
    lockstep: bool = False
    checked: bool = False
    deadline: float = 0  # seconds
    compiled_on: tuple[int, ...] = ()  # ranks that compile the transform in which it ends

    @property
    def is_transformed(self) -> bool:
        return self.ending not in {"each", "together", "tie", "second"}

    @property
    def backward_inside(self) -> bool:
        """Whether second derivatives are taken inside the lockstep block, or after it."""
        return self.seed % 2 == 0

    def leaves(self) -> list[Leaf]:
        return [step for step in self.body if isinstance(step, Leaf)]

    def calls(self) -> list[Call]:
        inner = [s for step in self.body for s in getattr(step, "body", (step,))]
        return [step for step in inner if isinstance(step, Call)]

    def but(self, **changes) -> Program:
        return replace(self, **changes)


SUBGROUPS = {1: (), 2: ((1,),), 3: ((0, 1), (0, 2), (1, 2)), 4: ((1, 3), (0, 2), (0, 1, 3))}
MESHES = {2: (1, 2), 4: (2, 2)}


def comms(world: int) -> dict[str, list[list[int]]]:
    """The groups of a world by name, each as the lists of ranks that communicate."""
    everyone = list(range(world))
    found = {"world": [everyone], "line": [everyone]}
    found |= {"group_" + "".join(map(str, ranks)): [list(ranks)] for ranks in SUBGROUPS[world]}
    if world in MESHES:
        rows, columns = MESHES[world]
        found["row"] = [everyone[r * columns : (r + 1) * columns] for r in range(rows)]
        found["column"] = [everyone[c::columns] for c in range(columns)]
    return found


def make_comm(name: str, world: int) -> str:
    """The Python that makes a group, on every rank."""
    if name == "line":
        return f'line = init_device_mesh("cpu", ({world},))'
    if name in {"row", "column"}:
        names = 'mesh_dim_names=("column", "row")'
        return f'mesh = init_device_mesh("cpu", {MESHES[world]}, {names})'
    return f"{name} = dist.new_group([{', '.join(name.removeprefix('group_'))}])"


def comm_code(name: str) -> str:
    return f'(mesh, "{name}")' if name in {"row", "column"} else name


def chosen_cut(length: int, ranks: int, seed: int) -> tuple[int, ...]:
    """Sizes by rank that add up to a length, some of them often 0."""
    random = Random(f"{length} {ranks} {seed}")
    points = sorted(random.randint(0, length) for _ in range(ranks - 1))
    return tuple(b - a for a, b in zip([0, *points], [*points, length], strict=True))


NESTS = {  # how a nest is made of variables, and taken apart
    "list": lambda names: f"[{', '.join(names)}]",
    "tuple": lambda names: f"({', '.join(names)},)",
    "dict": lambda names: "{" + ", ".join(f'"k{i}": {n}' for i, n in enumerate(names)) + "}",
    "deep": lambda names: f'{{"a": {names[0]}, "b": (None, [{", ".join(names[1:])}])}}',
    "named": lambda names: f"Pair({names[0]}, [{', '.join(names[1:])}])",
    "data": lambda names: f"Box({names[0]}, ({', '.join(names[1:])},))",
}
UNNESTS = {
    "list": lambda n: [f"[{i}]" for i in range(n)],
    "tuple": lambda n: [f"[{i}]" for i in range(n)],
    "dict": lambda n: [f'["k{i}"]' for i in range(n)],
    "deep": lambda n: ['["a"]', *(f'["b"][1][{i}]' for i in range(n - 1))],
    "named": lambda n: [".first", *(f".second[{i}]" for i in range(n - 1))],
    "data": lambda n: [".first", *(f".second[{i}]" for i in range(n - 1))],
}


class Writer:
    """Writes a program as Python; the oracle that ran it knows who holds what."""

    option = ""  # that replays such a program

    def __init__(self, program: Program, oracle) -> None:
        self.program, self.oracle = program, oracle

    def body(self) -> str:
        """Run by every rank, with ``rank`` and the groups at hand."""
        program = self.program
        context = ["ag.checked()"] * program.checked + [f"ag.deadline({program.deadline})"] * (
            program.deadline > 0
        )
        steps = self.steps()
        if context:
            steps = f"with {', '.join(context)}:\n{indent(steps, '    ')}"
        return steps

    def steps(self) -> str:
        """The program inside of its contexts."""
        steps = "\n".join(self.step(step) for step in self.program.body)
        if self.program.lockstep:
            inside, after = self._ending_in_lockstep()
            return f"with ag.lockstep() as step:\n{indent(steps, '    ')}{inside}\n{after}"
        return steps + "\n" + self._ending()

    def script(self, note: str = "") -> str:
        """A file of its own that prints what each rank gets."""
        used = {call.comm for call in self.program.calls()} - {"world"}
        groups = {make_comm(name, self.program.world): None for name in sorted(used)}
        lines = ["rank, world = dist.get_rank(), None", *groups, self.body(), self.returned()]
        faulty = "misbehave(" in self.body()
        helpers = [prelude, misbehave] if faulty else [prelude]
        return SCRIPT.format(
            note=indent(note, "# ", lambda _: True),
            replay=f"{'--faults ' * faulty}{self.option}--seed {self.program.seed}",
            prelude="\n\n".join(inspect.getsource(m).partition("\n\n")[2] for m in helpers),
            body=indent("\n".join(lines), "    "),
            world=self.program.world,
        )

    def returned(self) -> str:
        """What a script shows of each rank."""
        grads = ", ".join(f'"{x.out}.grad": {x.out}.grad' for x in self.program.leaves())
        return f"return {{{grads}}}"

    def step(self, step) -> str:
        ranks = self.oracle.ranks[id(step)]
        code = getattr(self, "_" + type(step).__name__.lower())(step)
        if len(ranks) == self.program.world:
            return code
        return f"if rank in {set(ranks)}:\n{indent(code, '    ')}"

    def _leaf(self, s: Leaf) -> str:
        shape, needs = by_rank(s.shapes), by_rank(s.needs_grad)
        return f'{s.out} = leaf(rank, {shape}, "{s.kind}", {s.seed}, {needs})'

    def _local(self, s: Local) -> str:
        return f"{s.out} = {s.code.format(*s.inputs)}"

    def _change(self, s: Change) -> str:
        return s.code.format(s.target)

    def _call(self, s: Call) -> str:
        names = s.inputs
        if s.name == "scatter":
            src = [group[s.options["src"]] for group in comms(self.program.world)[s.comm]]
            empty = f".narrow({s.options['dim']}, 0, 0)"
            others = {"any": "{0}", "empty": "{0}" + empty, "None": "None"}[s.off_src]
            if s.off_src != "any":
                names = [f"{n} if rank in {set(src)} else {others.format(n)}" for n in names]
        given = [f"{key}={value!r}" for key, value in s.args]
        given += [f"{key}={by_rank(value)}" for key, value in self.oracle.sizes[id(s)].items()]
        given += [f"group={comm_code(s.comm)}"] * (s.comm != "world")
        given += ["async_op=True"] * bool(s.handle)
        nest = NESTS[s.nest](names) if s.nest else names[0]
        call = f"ag.{s.name}({', '.join([nest, *given])})"
        if s.name == "gather_sizes":
            call = f"torch.tensor({call})"
        return f"{s.handle} = {call}" if s.handle else self._put(s.outs, call, s.nest)

    def _wait(self, s: Wait) -> str:
        return self._put(s.outs, f"{s.handle}.wait()", s.nest)

    def _waitinorder(self, s: WaitInOrder) -> str:
        code = {rank: f"[{', '.join(order)}]" for rank, order in enumerate(s.orders)}
        lines = [
            f"{'el' * (rank > 0)}if rank == {rank}:\n    handles = {code[rank]}" for rank in code
        ]
        mode = "torch.no_grad" if s.quiet else "torch.enable_grad"
        return "\n".join(
            [*lines, f"with {mode}():\n    for handle in handles:\n        handle.wait()"]
        )

    def _put(self, outs: tuple[str, ...], code: str, nest: str) -> str:
        if not nest:
            return f"{outs[0]} = {code}"
        taken = ", ".join("nest" + path for path in UNNESTS[nest](len(outs)))
        return f"nest = {code}\n{', '.join(outs)} = {taken}"

    def _block(self, s: Block) -> str:
        body = "\n".join([*(self.step(step) for step in s.body), f"return {s.body[-1].out}"])
        function = f"def block_{s.out}({s.input}):\n{indent(body, '    ')}\n"
        if s.wrap == "compile":
            call = f"torch.compile(block_{s.out}, {s.options})({s.input})"
            if len(s.compiled_on) < self.program.world:
                call += f" if rank in {set(s.compiled_on)} else block_{s.out}({s.input})"
        elif s.wrap in {"thread", "no_grad"}:
            call = f"{s.wrap}(block_{s.out}, {s.input})"
        else:
            reentrant = s.wrap == "reentrant"
            call = f"checkpoint(block_{s.out}, {s.input}, use_reentrant={reentrant})"
        return f"{function}{s.out} = {call}"

    def losses(self) -> list[str]:
        """Python that makes loss_0, loss_1, ... on this rank."""
        lines = []
        for i, loss in enumerate(self.program.losses):
            held = [
                [name for name in names or () if rank in self.oracle.env[name]]
                for rank, names in enumerate(loss)
            ]
            by = [" + ".join(f"use({name}, rank)" for name in names) or "None" for names in held]
            if len(set(by)) == 1:
                lines.append(f"loss_{i} = {by[0]}")
            else:
                for rank, code in enumerate(by):
                    lines.append(f"{'el' * (rank > 0)}if rank == {rank}:\n    loss_{i} = {code}")
        return lines

    def _second(self, backward: str) -> list[str]:
        leaves = ", ".join(x.out for x in self.program.leaves())
        return [
            f"leaves = [x for x in ({leaves},) if x.grad is not None]",
            "first = [x.grad for x in leaves]",
            "for x in leaves:\n    x.grad = None",
            "penalty = sum(use(g, rank) for g in first)",
            backward,
        ]

    def _ending(self) -> str:
        losses = [f"loss_{i}" for i in range(len(self.program.losses))]
        lines = self.losses()
        if self.program.ending == "second":
            lines.append(f"({' + '.join(losses)}).backward(create_graph=True)")
            lines += self._second("penalty.backward()")
        elif self.program.ending == "each":
            lines += [f"{loss}.backward(retain_graph=True)" for loss in losses]
        else:
            lines.append(f"({' + '.join(losses)}).backward()")
        return "\n".join(lines)

    def _ending_in_lockstep(self) -> tuple[str, str]:
        losses = [f"loss_{i}" for i in range(len(self.program.losses))]
        given = f"[x for x in ({', '.join(losses)},) if isinstance(x, torch.Tensor)]"
        lines = self.losses()
        if self.program.ending == "second":
            lines.append(f"step.backward({given}, create_graph=True)")
            lines += self._second("step.backward(penalty if first else None)")
            if self.program.backward_inside:
                return "\n" + indent("\n".join(lines), "    "), ""
            return "", "\n".join(lines)
        if self.program.ending == "each":
            lines += [f"step.backward({loss}, retain_graph=True)" for loss in losses]
        elif self.program.ending == "tie":
            some = f"sum({given}, torch.zeros((), dtype=torch.float64))"
            lines.append(f"step.tie({some}).backward()")
        else:
            lines.append(f"step.backward({given})")
        return "", "\n".join(lines)


def by_rank(values) -> str:
    """One value where all ranks have the same, else a choice by rank."""
    if isinstance(values, dict):
        alike = len(set(values.values())) == 1
        return repr(next(iter(values.values()))) if alike else f"{values}[rank]"
    return repr(values[0]) if len(set(values)) == 1 else f"{values}[rank]"


SCRIPT = """\
{note}
# Replay: python tests/fuzz {replay}
import torch
import torch.distributed as dist
from torch import func
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import allgrad as ag
from allgrad.testing import run_ranks

{prelude}

def program():
{body}


if __name__ == "__main__":
    for rank, found in enumerate(run_ranks(program, {world})):
        print(rank, found)
"""
