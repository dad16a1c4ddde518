"""A collective for what the ranks hold: which, of what, in which group, with which arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.fitting import (
    ALL,
    ALONG_DIM,
    LINEAR,
    RAGGED,
    REDUCING,
    SAME_GRAD,
    SAME_SHAPE,
    fits,
    ops,
    ways_to_tell_sizes,
)
from fuzz.program import NESTS, Call
from fuzz.transforms import is_adjoint

if TYPE_CHECKING:
    from fuzz.generate import Builder


def propose(builder: Builder, name: str, *, linear: bool, in_block: bool) -> Call | None:
    """A call whose pieces fit together on every group, or ``None``."""
    rng, env = builder.random, builder.oracle.env
    what = rng.choice(SAME_SHAPE + RAGGED)
    comm = rng.choice(["world"] * 3 + list(builder.oracle.comms))
    if builder.one_group:
        comm = "world"
    groups = builder.oracle.comms[comm]
    given = name or rng.choice(builder.names())
    if any(r not in env[given] for group in groups for r in group):
        return None
    if what == "gather_sizes" and (in_block or linear):
        return None
    if linear and what in {"share", "split"}:
        return None  # share hands its input through
    args: dict[str, object] = {}
    dims = next(iter(env[given].values())).dim()
    if what in ALONG_DIM:
        args["dim"] = rng.randrange(max(dims, 1)) - max(dims, 1) * builder.chance(0.25)
    inputs = [given]
    nest = ""
    if not name and not in_block and what != "gather_sizes" and builder.chance(0.25):
        nest = rng.choice(tuple(NESTS))
        others = [n for n in builder.names() if all(r in env[n] for g in groups for r in g)]
        inputs += [rng.choice(others) for _ in range(rng.randint(0, 2))]
        inputs += [given] if len(inputs) == 1 and nest in {"deep", "named", "data"} else []
    if builder.all_need and len(set(inputs)) > 1 and sum(map(len, groups)) < builder.world:
        # A second backward comes to all leaves of a nest by one of them: here, on some ranks only
        # (compiled seed 500362).
        return None
    if not all(fits(env[n], what, args.get("dim"), groups) for n in inputs):
        return None
    ranks = min(len(group) for group in groups)
    if what in REDUCING:
        some = set(LINEAR if linear else ALL)
        some.intersection_update(*(ops(builder.dtype(n)) for n in inputs))
        if not some:
            return None
        args["op"] = rng.choice(sorted(some))
    exact = args.get("op") in {"sum", "prod"} or all(map(builder.is_float, inputs))
    if what == "scan" and args["op"] != "mean" and exact and builder.chance(0.4):
        args["exclusive"] = True
    if what in {"broadcast", "scatter"}:
        args["src"] = rng.randrange(ranks)
    if what in {"reduce", "gather"}:
        args["dst"] = rng.randrange(ranks)
    if what == "permute":
        ends = rng.sample(range(ranks), ranks)
        pairs = [(a, b) for a, b in enumerate(ends) if builder.chance(0.75)]
        args["pairs"] = pairs
    if what == "shift":
        args |= {"offset": rng.randint(-2, 2), "wrap": builder.chance(0.6)}
    grads = ["same"] * (what in SAME_GRAD) + ["none"] * (what != "gather_sizes" and not in_block)
    if grads and builder.chance(0.25):
        args["grad"] = rng.choice(grads)
    promised = what in {"share", "split"} or args.get("grad") == "same"
    if promised and builder.transforms and not is_adjoint(builder.ending):
        return None  # the gradient is what ranks promise, and not the adjoint of the tangent
    if builder.is_second and builder.all_need and args.get("grad") == "none":
        # What is made of the result has no leaf below it: whether a rank's second backward comes
        # to it depends on what else the rank did with it (seed 31436).
        return None
    if builder.large and args.get("grad") == "same" and args.get("op", "sum") not in LINEAR:
        return None  # every rank reduces a share: exact only where ranks do the same work
    off_src = rng.choice(("empty", "any"))
    free = what == "scatter" and not nest and not builder.all_need and not in_block
    if free and (builder.lockstep or given not in builder.from_calls) and builder.chance(0.4):
        off_src = "None"
    ways = ways_to_tell_sizes([env[n] for n in inputs], what, args.get("dim"), groups)
    if not ways:
        return None
    sizes = rng.choice(ways)
    outs = tuple(builder.fresh() for _ in inputs)
    cut = rng.randrange(100)
    return Call(outs, what, tuple(inputs), tuple(args.items()), comm, sizes, cut, nest, "", off_src)
