"""Programs that torch.func differentiates, or dual numbers: the whole program is a function of its leaves.

| ending | what each rank gets |
|---|---|
| grad, vjp | the derivative of all ranks' losses by its own leaves |
| jvp, duals | the tangent of its own loss, all ranks' leaves moving |
| jvp of grad, grad of jvp, grad of grad | the derivative of the gradient along all ranks' tangents |
| vmap, vmap of grad, vmap of jvp | the same for each entry of a batch |
"""

from __future__ import annotations

from dataclasses import replace
from textwrap import indent

import torch

from fuzz import prelude
from fuzz.oracle import Oracle, Refused, Results, differentiate, losses_by_rank
from fuzz.program import Leaf, Program, Writer, by_rank

BATCH = 3
OTHER_SEEDS = 5000  # from one entry of a batch to the next
ENDINGS = {
    "grad": "func.grad(run, numbers)(*leaves)",
    "vjp": "func.vjp(run, *leaves)[1](torch.ones((), dtype=torch.float64))",
    "jvp": "func.jvp(run, leaves, tangents)[1:]",
    "duals": "duals(run, leaves, tangents)",
    "jvp of grad": "func.jvp(func.grad(run, numbers), leaves, tangents)[1]",
    "grad of jvp": "func.grad(lambda *xs: func.jvp(run, xs, tangents)[1], numbers)(*leaves)",
    "grad of grad": "func.grad(lambda *xs: along(func.grad(run, numbers)(*xs), tangents), numbers)(*leaves)",
    "vmap": "(func.vmap(run)(*leaves),)",
    "vmap of grad": "func.vmap(func.grad(run, numbers))(*leaves)",
    "vmap of jvp": "(func.vmap(lambda *xs: func.jvp(run, xs, tangents)[1])(*leaves),)",
}


def is_second(ending: str) -> bool:
    return ending in {"jvp of grad", "grad of jvp", "grad of grad"}


def is_adjoint(ending: str) -> bool:
    """Tell whether gradients alone are taken, whatever the tangents are."""
    return ending in {"grad", "vjp", "vmap", "vmap of grad"}


def variables(program: Program) -> list[Leaf]:
    return [leaf for leaf in program.leaves() if leaf.kind in {"normal", "ties"}]


class TransformWriter(Writer):
    """Writes leaves, a function of them, and its derivative."""

    option = "--transforms "

    def steps(self) -> str:
        program, moving = self.program, variables(self.program)
        names = ", ".join(leaf.out for leaf in moving)
        steps = [self.step(s) for s in program.body if not isinstance(s, Leaf)]
        loss = " + ".join(f"loss_{i}" for i in range(len(program.losses)))
        body = "\n".join([*steps, *self.losses(), f"return {loss}"])
        lines = [self._made(leaf) for leaf in program.leaves()]
        lines.append(f"def run({names}):\n{indent(body, '    ')}\n")
        lines.append(f"leaves, numbers = ({names},), {tuple(range(len(moving)))}")
        if "tangents" in ENDINGS[program.ending]:
            made = (f"tangent(rank, {by_rank(x.shapes)}, {x.seed})" for x in moving)
            lines.append(f"tangents = ({', '.join(made)},)")
        lines.append(f"def whole(*leaves):\n    return {ENDINGS[program.ending]}\n")
        compiled = 'torch.compile(whole, backend="aot_eager")'
        if program.compiled_on:
            lines.append(f"if rank in {set(program.compiled_on)}:\n    whole = {compiled}")
        lines.append(f"{', '.join(self._results())}, = whole(*leaves)")
        return "\n".join(lines)

    def returned(self) -> str:
        found = ", ".join(f'"{name}": {name}' for name in self._results())
        return f"return {{{found}}}"

    def _made(self, leaf: Leaf) -> str:
        call = f'leaf(rank, {by_rank(leaf.shapes)}, "{leaf.kind}", {{seed}}, False)'
        if not self.program.ending.startswith("vmap") or leaf not in variables(self.program):
            return f"{leaf.out} = {call.format(seed=leaf.seed)}"
        entries = call.format(seed=f"{leaf.seed} + {OTHER_SEEDS} * b")
        return f"{leaf.out} = torch.stack([{entries} for b in range({BATCH})])"

    def _results(self) -> list[str]:
        if self.program.ending in {"jvp", "duals", "vmap", "vmap of jvp"}:
            return ["of_loss"]
        return ["of_" + leaf.out for leaf in variables(self.program)]


def run_oracle(program: Program) -> tuple[Results, Writer]:
    """What every rank should get, by the name of the result; and the program as Python."""
    oracle, found = derivatives(program, program)
    if program.ending.startswith("vmap"):
        entries = [found, *(derivatives(entry(program, b), program)[1] for b in range(1, BATCH))]
        found = {
            name: {r: torch.stack([one[name][r] for one in entries]) for r in by}
            for name, by in found.items()
        }
    return Results(found), TransformWriter(program, oracle)


def has_meaning(program: Program) -> bool:
    """Tell whether all entries of a batch have a stable one."""
    try:
        if program.ending.startswith("vmap"):
            run_oracle(program)
    except Refused:
        return False
    return True


def entry(program: Program, b: int) -> Program:
    """The program of one entry of a batch."""
    moving = variables(program)
    body = tuple(
        replace(step, seed=step.seed + OTHER_SEEDS * b) if step in moving else step
        for step in program.body
    )
    return program.but(body=body)


def derivatives(program: Program, first: Program) -> tuple[Oracle, dict]:
    """Run the program in one process; tangents are those of the first entry of a batch."""
    oracle, ranks, ending = Oracle(program.world), range(program.world), program.ending
    for step in program.body:
        oracle.run(step)
    places = [(leaf.out, r) for leaf in variables(program) for r in ranks]
    inputs = [oracle.env[name][r] for name, r in places]
    terms = losses_by_rank(program, oracle)
    if ending == "vmap":
        return oracle, {"of_loss": {r: sum(terms[r]).detach() for r in ranks}}
    tangents = [
        prelude.tangent(r, leaf.shapes[r], leaf.seed) for leaf in variables(first) for r in ranks
    ]
    if ending in {"jvp", "duals", "vmap of jvp"}:
        return oracle, {"of_loss": {r: _along(terms[r], inputs, tangents) for r in ranks}}
    every = [term for by in terms for term in by]
    grads = differentiate(every, inputs, create_graph=True)
    if is_second(ending):
        grads = differentiate([_dot(grads, tangents)], inputs)
    found: dict = {}
    for (name, r), x, g in zip(places, inputs, grads, strict=True):
        found.setdefault("of_" + name, {})[r] = torch.zeros_like(x) if g is None else g.detach()
    return oracle, found


def _along(terms, inputs, tangents) -> torch.Tensor:
    return _dot(differentiate(terms, inputs, retain_graph=True), tangents).detach()


def _dot(grads, tangents) -> torch.Tensor:
    some = [(g * t).sum() for g, t in zip(grads, tangents, strict=True) if g is not None]
    return sum(some, torch.zeros((), dtype=torch.float64))
