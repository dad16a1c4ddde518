"""The same program in one process that holds all ranks' tensors: plain torch, from the docs alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import reference
from fuzz import prelude
from fuzz.program import (
    Block,
    Call,
    Change,
    Leaf,
    Local,
    Program,
    Wait,
    WaitInOrder,
    Writer,
    chosen_cut,
    comms,
)


class Refused(Exception):
    """A step that has no stable meaning: too large, not finite, or two values too close to a tie."""


@dataclass
class Results:
    """What every rank should end with: values by variable, and gradients by leaf."""

    values: dict[str, dict[int, torch.Tensor]]
    first: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    second: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)


class Oracle:
    """Runs steps one by one; ``env[name][rank]`` is what a rank holds."""

    def __init__(self, world: int) -> None:
        self.world, self.comms = world, comms(world)
        self.env: dict[str, dict[int, torch.Tensor]] = {}
        self.pending: dict[str, list[dict[int, torch.Tensor]]] = {}
        self.sizes: dict[int, dict[str, dict[int, object]]] = {}  # by the call's id
        self.ranks: dict[int, list[int]] = {}  # by the step's id

    def run(self, step) -> None:
        getattr(self, "_" + type(step).__name__.lower())(step)

    def forget(self, name: str) -> None:
        self.env.pop(name, None)

    def _leaf(self, s: Leaf) -> None:
        self.ranks[id(s)] = list(range(self.world))
        self.env[s.out] = {
            r: prelude.leaf(r, s.shapes[r], s.kind, s.seed, s.needs_grad[r])
            for r in range(self.world)
        }

    def _local(self, s: Local) -> None:
        ranks = sorted(set.intersection(*(set(self.env[name]) for name in s.inputs)))
        if not ranks:
            raise Refused
        self.ranks[id(s)] = ranks
        made = {r: self._evaluate(s.code.format(*s.inputs), r) for r in ranks}
        refuse_extremes(made.values())
        self.env[s.out] = made

    def _change(self, s: Change) -> None:
        self.ranks[id(s)] = ranks = sorted(self.env[s.target])
        for r in ranks:
            names = {**self._at(r), "rank": r, "misbehave": lambda _: None}
            names["history"] = prelude.history
            exec(s.code.format(s.target), names)

    def _evaluate(self, code: str, rank: int) -> torch.Tensor:
        return eval(code, {**self._at(rank), "torch": torch, "rank": rank})  # noqa: S307

    def _at(self, rank: int) -> dict[str, torch.Tensor]:
        return {name: held[rank] for name, held in self.env.items() if rank in held}

    def _block(self, s: Block) -> None:
        for step in s.body:
            self.run(step)
        inner = [name for step in s.body for name in getattr(step, "outs", None) or (step.out,)]
        made = self.env[inner[-1]]
        self.ranks[id(s)] = sorted(made)
        self.env[s.out] = {r: x.detach() for r, x in made.items()} if s.wrap == "no_grad" else made
        for name in inner:
            if name != s.out:
                self.forget(name)

    def _waitinorder(self, s: WaitInOrder) -> None:
        self.ranks[id(s)] = list(range(self.world))

    def _wait(self, s: Wait) -> None:
        results = self.pending.pop(s.handle)
        self.ranks[id(s)] = sorted(results[0])
        self.env.update(zip(s.outs, results, strict=True))

    def _call(self, s: Call) -> None:
        groups = self.comms[s.comm]
        self.ranks[id(s)] = sorted(r for group in groups for r in group)
        self.sizes[id(s)] = self._sizes_by_rank(s)
        results: list[dict[int, torch.Tensor]] = [{} for _ in s.inputs]
        for group in groups:
            for name, into in zip(s.inputs, results, strict=True):
                pieces = [self.env[name][r] for r in group]
                for r, made in zip(group, collective(s, pieces), strict=True):
                    into[r] = made
        for into in results:
            refuse_extremes(into.values(), infinite_allowed=s.options.get("exclusive", False))
        if s.handle:
            self.pending[s.handle] = results
        else:
            self.env.update(zip(s.outs, results, strict=True))

    def _sizes_by_rank(self, s: Call) -> dict[str, dict[int, object]]:
        """The arguments about sizes, by rank."""
        if s.sizes == "found" or s.name in {"all_reduce", "broadcast", "reduce", "scan", "share"}:
            return {}
        key = "send_sizes" if s.name == "all_to_all" else "sizes"
        found: dict[str, dict[int, object]] = {key: {}}
        for group in self.comms[s.comm]:
            held = [length(self.env[s.inputs[0]][r], s) for r in group]
            for i, r in enumerate(group):
                if s.sizes == "equal":
                    found[key][r] = "equal"
                elif s.name in {"all_gather", "gather", "permute", "shift"}:
                    found[key][r] = tuple(held)
                elif s.name == "all_to_all":
                    blocks = [chosen_cut(n, len(group), s.cut + j) for j, n in enumerate(held)]
                    found[key][r] = blocks[i]
                    arriving = tuple(block[i] for block in blocks)
                    found.setdefault("recv_sizes", {})[r] = arriving
                else:
                    src = s.options.get("src", i)
                    found[key][r] = chosen_cut(held[src], len(group), s.cut)
        if "recv_sizes" in found and s.cut % 2:
            del found["recv_sizes"]  # to be found out
        return found


def length(x: torch.Tensor, s: Call) -> int:
    return x.shape[s.options.get("dim", 0)] if x.dim() else 1


def collective(s: Call, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each rank of a group gets, and whose gradients it owes to whom."""
    grad = s.options.get("grad", "sum")
    if grad == "same":
        results = [formula(s, seen)[r] for r, seen in enumerate(seen_alike(xs))]
    else:
        results = formula(s, xs)
    if grad == "none":
        results = [y.detach() for y in results]
    return [y.clone() for y in results]


def formula(s: Call, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    options = {k: v for k, v in s.options.items() if k != "grad"}
    world, name = len(xs), s.name
    if options.get("op") in {"min", "max"}:
        refuse_near_ties(torch.stack(xs))
    if name == "share":
        return list(Share.apply(*xs))
    if name == "split":
        cut = sizes_of(s, xs[0], world)
        wholes = reference.at_least_1d(Share.apply(*xs))
        return [reference.split(x, world, options["dim"], cut)[r] for r, x in enumerate(wholes)]
    if name == "scatter":
        whole = xs[options["src"]]
        return reference.scatter(whole, world, options["dim"], sizes_of(s, whole, world))
    if name == "reduce_scatter":
        return reference.reduce_scatter(xs, **options, sizes=sizes_of(s, xs[0], world))
    if name == "all_to_all":
        blocks = [chosen_cut(length(x, s), world, s.cut + r) for r, x in enumerate(xs)]
        return reference.all_to_all(
            reference.at_least_1d(xs), options["dim"], blocks if s.sizes == "given" else None
        )
    if name == "gather_sizes":
        return [torch.tensor([length(x, s) for x in xs])] * world
    if name in {"permute", "shift"}:
        options.pop("dim", None)
        xs = reference.at_least_1d(xs)
    return getattr(reference, name)(xs, **options)


class Share(torch.autograd.Function):
    """A value that all ranks hold, for work that differs by rank: the derivative sums over ranks."""

    @staticmethod
    def forward(_, *xs):
        return tuple(x.clone() for x in xs)

    @staticmethod
    def backward(_, *gradients):
        return Same.apply(*gradients)


class Same(torch.autograd.Function):
    """A sum with which every rank does the same work: the derivative is a value that all hold."""

    @staticmethod
    def forward(_, *xs):
        return tuple(sum(xs).clone() for _ in xs)

    @staticmethod
    def backward(_, *gradients):
        return Share.apply(*gradients)


def seen_alike(xs: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """All ranks' pieces as each rank sees them, to do the same work with them."""
    if not (xs[0].is_floating_point() or xs[0].is_complex()):
        return [xs] * len(xs)
    counts = [x.numel() for x in xs]
    padded = []
    for r, x in enumerate(xs):
        before, after = sum(counts[:r]), sum(counts[r + 1 :])
        padded.append(torch.cat([x.new_zeros(before), x.reshape(-1), x.new_zeros(after)]))
    return [
        [flat.view(x.shape) for flat, x in zip(whole.split(counts), xs, strict=True)]
        for whole in Same.apply(*padded)
    ]


def sizes_of(s: Call, x: torch.Tensor, world: int) -> tuple[int, ...] | None:
    return chosen_cut(length(x, s), world, s.cut) if s.sizes == "given" else None


def refuse_near_ties(stacked: torch.Tensor) -> None:
    if stacked.is_floating_point():
        apart = (stacked.unsqueeze(0) - stacked.unsqueeze(1)).abs()
        if ((apart > 0) & (apart < 1e-6)).any():
            raise Refused


def refuse_extremes(values, *, infinite_allowed: bool = False) -> None:
    for x in values:
        seen = x.nan_to_num(posinf=0, neginf=0) if infinite_allowed and not x.is_complex() else x
        if x.numel() > 400_000 or (x.dtype != torch.bool and not bool((seen.abs() < 60).all())):
            raise Refused


def run_oracle(program: Program) -> tuple[Results, Writer]:
    """Values, first and second derivatives; and the program as Python."""
    if program.is_transformed:
        from fuzz import transforms

        return transforms.run_oracle(program)
    oracle = Oracle(program.world)
    for step in program.body:
        oracle.run(step)
    writer = Writer(program, oracle)
    results = Results(
        {n: {r: x.detach().clone() for r, x in by.items()} for n, by in oracle.env.items()}
    )
    leaves = [(x.out, r) for x in program.leaves() for r in range(program.world)]
    wanted = [(name, r) for name, r in leaves if oracle.env[name][r].requires_grad]
    inputs = [oracle.env[name][r] for name, r in wanted]
    second_order = program.ending == "second"
    terms = [term for by in losses_by_rank(program, oracle) for term in by]
    grads = differentiate(terms, inputs, create_graph=second_order)
    results.first = by_name(wanted, [None if g is None else g.detach() for g in grads])
    if second_order:
        found = [(g, r) for (_, r), g in zip(wanted, grads, strict=True) if g is not None]
        terms = [prelude.use(g, r) for g, r in found]
        results.second = by_name(wanted, differentiate(terms, inputs))
    return results, writer


def losses_by_rank(program: Program, oracle: Oracle) -> list[list[torch.Tensor]]:
    """The terms of each rank's loss."""
    return [
        [
            prelude.use(oracle.env[name][r], r)
            for loss in program.losses
            for name in loss[r] or ()
            if r in oracle.env[name]
        ]
        for r in range(program.world)
    ]


def differentiate(terms, inputs, *, create_graph=False, retain_graph=None):
    terms = [term for term in terms if term.requires_grad]
    if not terms or not inputs:
        return [None] * len(inputs)
    return torch.autograd.grad(
        sum(terms), inputs, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
    )


def by_name(places, tensors) -> dict[str, dict[int, torch.Tensor]]:
    found: dict[str, dict[int, torch.Tensor]] = {}
    for (name, rank), x in zip(places, tensors, strict=True):
        found.setdefault(name, {})[rank] = x
    return found
