"""Random programs: the same seed gives the same program. The oracle runs along, step by step, so
that the generator knows what every rank holds, and takes back a step without a stable meaning.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from fuzz.fitting import LINEAR, SAME_GRAD
from fuzz.oracle import Oracle
from fuzz.program import Block, Call, Change, Leaf, Local, Program, Wait, WaitInOrder
from fuzz.proposals import propose
from fuzz.transforms import ENDINGS, has_meaning, is_second

LOCALS = (
    "{0}.sin()",
    "{0} * {0}",
    "{0} * (rank + 1)",
    "{0}.tanh() + 0.5",
    "{0} + {1}",
    "{0} * {1}.sum()",
    "torch.cat([{0}, {1}])",
    "{0}.detach()",
)
STRIDES = (
    "{0}.transpose(0, -1)",
    "{0}[::2]",
    "{0}[..., 1:]",
    "{0}[: rank + 1]",
    "{0}[rank:]",
    "{0}.flip(0)",
    "{0}.expand(2, *{0}.shape)",
    "{0}.sum()",
    "{0}.reshape(-1)",
    "{0}.t().contiguous().t()",
)
DTYPES = ("{0}.float()", "{0}.bfloat16()", "{0}.half()", "{0} * (1 + 2j)")
BACK = {"torch.complex128": "{0}.real + 2 * {0}.imag"}
HOOK = "if {0}.requires_grad:\n    {0}.register_hook(lambda g: g if g is None else g * 1.5)"


def generate(seed: int, *, compiled: bool = False, transforms: bool = False) -> Program:
    """The program of a seed; with ``compiled`` some of its blocks are compiled on some ranks, with
    ``transforms`` it ends in one of torch.func's or in dual numbers.
    """
    return Builder(seed, compiled=compiled, transforms=transforms).program()


class Builder:
    def __init__(self, seed: int, *, compiled: bool, transforms: bool) -> None:
        self.seed, self.random, self.compiled = seed, Random(seed), compiled
        self.transforms = transforms
        self.world = self.random.choice((1, 2, 2, 3, 3, 3, 4, 4))
        # Of handles of one group a rank may wait for some earlier than others do.
        self.one_group = not (compiled or transforms) and Random(~seed).random() < 0.25
        self.lockstep = self.chance(0.35) and not transforms
        self.ending = self.random.choice(("together", "each", "second", "second"))
        if compiled and self.chance(0.5):
            self.ending = "together"
        if self.lockstep and self.chance(0.2):
            self.ending = "tie"
        self.large = self.chance(0.03) and not transforms
        if transforms:
            self.ending = self.random.choice(tuple(ENDINGS))
        self.is_second = self.ending == "second" or is_second(self.ending)
        self.all_need = transforms or (self.ending == "second" and not self.lockstep)
        self.oracle = Oracle(self.world)
        self.steps: list = []
        self.from_calls: set[str] = set()  # what depends on a collective
        self.need_grad: set[str] = set()  # what requires grad on every rank
        self.exact: set[str] = set()  # whole numbers: no rounding on the way
        self.hidden: set[str] = set()  # not to be used further
        self.opaque: set[str] = set()  # a hook would see what the reduction does inside
        self.forced: set[str] = set()  # to be used by every rank's loss
        self.ancestors: dict[str, set[str]] = {}
        self.count = 0

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def fresh(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def program(self) -> Program:
        for _ in range(self.random.randint(1, 2)):
            self.add_leaf()
        kinds = (self.add_leaf, self.add_local, self.add_strides, self.add_dtype, self.add_call)
        kinds += (self.add_wait, self.add_hook, self.add_block, self.add_change, self.add_history)
        weights = (6, 12, 10, 6, 45, 9, 4, 25 if self.compiled else 8, 5, 2)
        if self.transforms:  # what else there is belongs to autograd
            weights = (*weights[:5], 0, 0, 0, 0, 0)
        for _ in range(4 if self.large else self.random.randint(2, 12)):
            self.random.choices(kinds, weights)[0]()
        if not any(isinstance(step, Call | Block) for step in self.steps):
            self.add_call()
        while self.oracle.pending and not (self.lockstep and self.chance(0.2)):
            self.add_wait()
        program = Program(
            self.seed,
            self.world,
            tuple(self.steps),
            tuple(self.loss() for _ in range(self.random.choice((1, 1, 2)))),
            self.ending,
            self.lockstep,
            checked=self.chance(0.25),
            deadline=30 * self.chance(0.2) * (not self.compiled or not self.transforms),
            compiled_on=self.compiling_ranks() if self.transforms and self.compiled else (),
        )
        # Another entry of a batch may come to a tie, or to numbers that are too large.
        return program if has_meaning(program) else program.but(ending="grad")

    def loss(self) -> tuple:
        names = [name for name in self.oracle.env if name not in self.hidden]
        must = {x.out for x in self.steps if isinstance(x, Leaf)} | self.forced
        if not self.lockstep:
            used = {n for n in names if n in must or self.chance(0.85)}
            # What only some ranks hold would take only them back to what all ranks called before.
            for name in list(used):
                if len(self.oracle.env[name]) < self.world:
                    used |= self.ancestors[name]
            return (tuple(n for n in names if n in used),) * self.world
        losses = []
        for _ in range(self.world):
            some = tuple(n for n in names if n in self.forced or self.chance(0.6))
            losses.append(some if self.forced or self.chance(0.85) else None)
        return tuple(losses)

    # ------------------------------------------------------------------ what is there

    def dtype(self, name: str) -> str:
        return str(next(iter(self.oracle.env[name].values())).dtype)

    def is_float(self, name: str) -> bool:
        return self.dtype(name) == "torch.float64"

    def names(self, fits=lambda _: True) -> list[str]:
        return [n for n in self.oracle.env if n not in self.hidden and fits(n)]

    def attempt(self, step) -> bool:
        """Let the oracle run a step; keep it if that has a meaning."""
        before = dict(self.oracle.env)
        try:
            self.oracle.run(step)
        except Exception:  # noqa: BLE001 - whatever torch says to shapes that do not fit
            self.oracle.env = before
            return False
        self.steps.append(step)
        return True

    def inherit(self, out: str, inputs: tuple[str, ...], code: str = "") -> None:
        self.descend(out, inputs)
        if any(name in self.from_calls for name in inputs):
            self.from_calls.add(out)
        if any(name in self.need_grad for name in inputs) and "detach" not in code:
            self.need_grad.add(out)
        if all(name in self.exact for name in inputs) and code in (*STRIDES, *DTYPES, ""):
            self.exact.add(out)

    def descend(self, out: str, inputs: tuple[str, ...]) -> None:
        self.ancestors[out] = set(inputs).union(*(self.ancestors.get(n, set()) for n in inputs))

    # ------------------------------------------------------------------ steps

    def add_leaf(self) -> None:
        rng = self.random
        kind = rng.choice(("normal",) * 5 + ("ties",) * 3 + ("int", "bool"))
        shape = [rng.choice((0, 1, 2, 2, 3, 4)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
        if self.large:
            shape = [rng.choice((5, 40)), rng.choice((100, 400, 1500))]
        shapes = [tuple(shape)] * self.world
        if shape and self.chance(0.5):
            dim = rng.randrange(len(shape))
            shapes = [
                (*shape[:dim], rng.choice((0, 1, 2, 3, 5)), *shape[dim + 1 :]) for _ in shapes
            ]
        first = not self.steps  # every rank has something to differentiate
        kind = "ties" if first and kind in {"int", "bool"} else kind
        needs = tuple(first or self.all_need or self.chance(0.85) for _ in shapes)
        step = Leaf(self.fresh("x"), tuple(shapes), kind, needs, rng.randrange(1000))
        if self.attempt(step):
            if all(needs) and kind in {"normal", "ties"}:
                self.need_grad.add(step.out)
            if kind != "normal":
                self.exact.add(step.out)

    def add_local(self, name: str = "", codes=LOCALS) -> str:
        names = self.names(self.is_float)
        if not names:
            return ""
        code = self.random.choice(codes)
        if "cat" in code and (self.is_second or (self.transforms and self.compiled)):
            return ""  # of an empty vector torch.cat has no second derivative, and no graph
        inputs = (name or self.random.choice(names), self.random.choice(names))
        inputs = inputs[: 2 if "{1}" in code else 1]
        held = {tuple(self.oracle.env[name]) for name in inputs}
        if self.all_need and len(held) > 1:
            return ""  # a second backward would come to both on some ranks only (seed 8012236)
        step = Local(self.fresh(), code, inputs)
        if not self.attempt(step):
            return ""
        self.inherit(step.out, inputs, code)
        return step.out

    def add_strides(self) -> None:
        names = self.names()
        step = Local(self.fresh(), self.random.choice(STRIDES), (self.random.choice(names),))
        flat = next(iter(self.oracle.env[step.inputs[0]].values())).dim() == 0
        if flat and self.ending.startswith("vmap"):
            return  # torch.func.vmap knows no dim 0 of a number
        if self.attempt(step):
            self.inherit(step.out, step.inputs, step.code)

    def add_dtype(self) -> None:
        """Lower precision only for whole numbers: values stay exact, gradients are rounded."""
        exact = self.names(lambda n: n in self.exact and self.is_float(n))
        name = self.random.choice(exact if exact and self.chance(0.6) else self.names())
        if self.is_float(name):
            # Rounded gradients, and the sine of them in a penalty, are no second derivative to compare.
            exact_enough = name in self.exact and self.ending in {"together", "each", "tie"}
            codes = DTYPES if exact_enough else DTYPES[3:]
            code = self.random.choice(codes)
        else:
            code = BACK.get(self.dtype(name), "{0}.double()")
        step = Local(self.fresh(), code, (name,))
        if self.attempt(step):
            self.inherit(step.out, (name,), code)

    def add_hook(self) -> None:
        names = self.names(lambda n: self.is_float(n) and n not in self.opaque)
        if names:
            self.attempt(Change(self.random.choice(names), HOOK))

    def add_history(self) -> None:
        """One rank more than the other has nodes of autograd behind it."""
        name = self.random.choice(self.names())
        self.attempt(Change(name, f"history({self.random.choice((3, 50, 400))} * rank)"))

    def add_wait(self) -> None:
        if len(self.oracle.pending) > 1 - self.one_group and self.chance(0.5):
            self.add_wait_in_order()
            if self.one_group:
                self.add_call()
        if self.oracle.pending:
            handle = self.random.choice(sorted(self.oracle.pending))
            start = next(s for s in self.steps if getattr(s, "handle", "") == handle)
            self.attempt(Wait(start.outs, handle, start.nest))

    def add_wait_in_order(self) -> None:
        """Any order by rank among the handles of one group."""
        starts = [s for s in self.steps if getattr(s, "handle", "") in self.oracle.pending]
        starts = [s for s in starts if isinstance(s, Call)]
        group = self.random.choice(starts).comm
        handles = [s.handle for s in starts if s.comm == group]
        orders = [
            [h for h in handles if rank in self.oracle.pending[h][0]] for rank in range(self.world)
        ]
        for order in orders:
            self.random.shuffle(order)
            if self.one_group:
                del order[self.random.randint(0, len(order)) :]
        if len(handles) > 1 or self.one_group:
            quiet = self.one_group and self.chance(0.5)
            self.attempt(WaitInOrder(tuple(handles), tuple(map(tuple, orders)), quiet))

    def add_change(self) -> None:
        """Change a result in place at once, or an input once the call is done with it."""
        change = self.random.choice(("{0}.mul_(0.5)", "{0}.add_(1)"))
        if self.chance(0.5):
            name = self.add_local(codes=("{0}.clone()",))
            if name and self.make_call(name, linear=True):
                self.attempt(Change(name, change))
            return
        call = self.make_call(linear=True)
        if call:
            self.attempt(Change(self.random.choice(call.outs), change))

    def add_call(self) -> None:
        call = self.make_call(async_allowed=not self.transforms)
        if self.transforms:
            return
        if call and self.chance(0.2) and not call.handle and call.outs[0] not in self.opaque:
            self.attempt(Change(call.outs[0], HOOK))

    def add_block(self) -> None:
        names = self.names(lambda n: self.is_float(n) and len(self.oracle.env[n]) == self.world)
        if not names:
            return
        name, wrap = self.random.choice(names), self.random.choice(("checkpoint", "reentrant"))
        if wrap == "reentrant" and (name not in self.need_grad or self.ending == "second"):
            wrap = "checkpoint"
        if self.compiled and self.chance(0.6):
            wrap = "compile"
        elif self.chance(0.3):
            wrap = self.random.choice(self.other_wraps())
        before = len(self.steps)
        inner = self.add_local(name, codes=("{0}.sin()", "{0} * {0}", "{0} + 1")) or name
        call = self.make_call(inner, linear=False, in_block=True)
        body = tuple(self.steps[before:])
        del self.steps[before:]
        for step in body:
            for out in getattr(step, "outs", None) or (step.out,):
                self.oracle.forget(out)
        if call is None:
            return
        if wrap == "thread" and sum(map(len, self.oracle.comms[call.comm])) < self.world:
            wrap = "checkpoint"  # ranks use threads alike: what goes backward first depends on it
        # docs/failures.md: where groups leave ranks out, these may come to a checkpoint in two orders.
        if {wrap, *self.wraps()} >= {"thread", "reentrant"}:
            wrap = "checkpoint"
        if not self.one_group and {wrap, *self.wraps()} >= {"thread", "checkpoint"}:
            return
        ranks = self.compiling_ranks() if wrap == "compile" else ()
        out = self.fresh()
        codes = ["{0} * {0}", "{0} * 1.5"]
        result = Local(out + "_", self.random.choice(codes), call.outs)
        options = self.compile_options() if wrap == "compile" else ""
        if self.attempt(Block(out, wrap, name, (*body, result), ranks, options)):
            self.descend(out, (name,))
            self.from_calls.add(out)
            if wrap == "no_grad":
                return
            self.need_grad.add(out)
            if self.lockstep:  # its recomputation happens only where something needs it
                self.forced.add(out)

    def compiling_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world) if self.chance(0.7))

    def wraps(self) -> set[str]:
        return {step.wrap for step in self.steps if isinstance(step, Block)}

    def other_wraps(self) -> list[str]:
        """A lockstep block is of one thread; for the other limit see "none" in propose."""
        return ["thread"] * (not self.lockstep) + ["no_grad"] * (not self.all_need) or [
            "checkpoint"
        ]

    def compile_options(self) -> str:
        """AOTAutograd has no second derivatives, and may not go backward twice; around lockstep, calls
        leave the graph.
        """
        once = self.ending in {"together", "tie"}
        backend = "aot_eager" if once and self.chance(0.8) else "eager"
        options = [f'backend="{backend}"']
        options += ["fullgraph=True"] * (not self.lockstep and self.chance(0.5))
        options += ["dynamic=True"] * self.chance(0.3)
        return ", ".join(options)

    # ------------------------------------------------------------------ collectives

    def make_call(
        self,
        name: str = "",
        *,
        linear: bool = False,
        in_block: bool = False,
        async_allowed: bool = False,
    ) -> Call | None:
        """Add a collective of ``name`` or of any variable; ``linear`` ones save nothing."""
        for _ in range(12):
            call = self.repeated() if async_allowed and self.chance(0.1) else None
            call = call or propose(self, name, linear=linear, in_block=in_block)
            if call is None:
                continue
            if async_allowed and call.name != "gather_sizes" and self.chance(0.25):
                call = Call(**{**call.__dict__, "handle": self.fresh("h")})
            if self.attempt(call):
                for out, given in zip(call.outs, call.inputs, strict=True):
                    self.descend(out, call.inputs)
                    self.describe(out, given, call)
                return call
        return None

    def repeated(self) -> Call | None:
        """An earlier call again, with another gradient: what is kept of calls must not mix them up."""
        earlier = [s for s in self.steps if isinstance(s, Call) and s.name in SAME_GRAD]
        earlier = [s for s in earlier if not self.hidden.intersection(s.inputs)]
        if not earlier or self.large:
            return None
        call = self.random.choice(earlier)
        grad = "sum" if call.options.get("grad") == "same" else "same"
        args = tuple((call.options | {"grad": grad}).items())
        return replace(call, outs=tuple(self.fresh() for _ in call.outs), args=args, handle="")

    def describe(self, out: str, given: str, call: Call) -> None:
        self.from_calls.add(out)
        dtype = "int" if call.name == "gather_sizes" else self.dtype(given)
        if call.options.get("grad") != "none" and ("float" in dtype or "complex" in dtype):
            self.need_grad.add(out)
        if given in self.exact and call.options.get("op") not in {"mean", "logsumexp"}:
            self.exact.add(out)
        if call.options.get("op", "sum") not in LINEAR and self.ending == "second":
            self.opaque.add(out)
        lowest = call.options.get("exclusive") and call.options["op"] not in {"sum", "prod"}
        if lowest and not call.handle and "float" in dtype:  # infinite on the first rank
            self.hidden.add(out)
            clamped = Local(self.fresh(), "{0}.clamp(-9, 9)", (out,))
            if self.attempt(clamped):
                self.inherit(clamped.out, (out,))
