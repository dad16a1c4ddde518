"""<A x, y> = <x, A* y>, summed over ranks, for shapes, sizes, dims, groups and strides at random."""

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import allgrad as ag
from allgrad.testing import adjoint_check, run_ranks
from calls import EVERYTHING
from exactness import laid_out, random

LAYOUTS = ("contiguous", "transposed", "slice")

COLLECTIVES = {
    "all_gather": lambda x, c, g: ag.all_gather(x, c["dim"], group=g),
    "all_reduce": lambda x, c, g: ag.all_reduce(x, c["op"], group=g),
    "reduce_scatter": lambda x, c, g: ag.reduce_scatter(x, c["dim"], c["op"], group=g),
    "all_to_all": lambda x, c, g: ag.all_to_all(x, c["dim"], group=g),
    "broadcast": lambda x, c, g: ag.broadcast(x, c["root"], group=g),
    "reduce": lambda x, c, g: ag.reduce(x, c["root"], c["op"], group=g),
    "gather": lambda x, c, g: ag.gather(x, c["root"], c["dim"], group=g),
    "permute": lambda x, c, g: ag.permute(x, c["pairs"], dim=c["dim"], group=g),
    "shift": lambda x, c, g: ag.shift(x, c["offset"], wrap=c["wrap"], dim=c["dim"], group=g),
    "scan": lambda x, c, g: ag.scan(x, c["op"], exclusive=c["wrap"] and c["op"] == "sum", group=g),
}
RAGGED = {"all_gather", "gather", "permute", "shift", "all_to_all"}


@st.composite
def cases(draw):
    world = draw(st.integers(1, 4))
    members = draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True).map(sorted))
    size = len(members)
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    order = draw(st.permutations(range(size)))
    sent = draw(st.integers(0, size))
    return {
        "world": world,
        "members": members,
        "name": draw(st.sampled_from(sorted(COLLECTIVES))),
        "shape": shape,
        "lengths": draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)),
        "dim": draw(st.integers(-len(shape), len(shape) - 1)),
        "root": draw(st.integers(0, size - 1)),
        "op": draw(st.sampled_from(["sum", "mean"])),
        "pairs": list(enumerate(order))[:sent],
        "offset": draw(st.integers(-5, 5)),
        "wrap": draw(st.booleans()),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "gradient_layout": draw(st.sampled_from(LAYOUTS)),
        "complex": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


def identity_holds(case):
    members = case["members"]
    group = dist.new_group(members) if len(members) < case["world"] else None
    if dist.get_rank() not in members:
        return
    rank = members.index(dist.get_rank())
    shape = list(case["shape"])
    if case["name"] in RAGGED:
        shape[case["dim"]] = case["lengths"][rank]
    dtype = torch.complex128 if case["complex"] else torch.float64
    x = laid_out(random(shape, case["seed"] + rank, dtype), case["layout"])

    def forward(x):
        return COLLECTIVES[case["name"]](x, case, group)

    def adjoint(y):
        leaf = x.detach().clone().requires_grad_()
        return torch.autograd.grad(forward(leaf), leaf, y)[0]

    y_shape = forward(x).shape
    y = laid_out(random(y_shape, case["seed"] + 500 + rank, dtype), case["gradient_layout"])
    adjoint_check(lambda x: forward(x).detach(), adjoint, x, y, group=group)


@settings(
    max_examples=60 if EVERYTHING else 30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(cases())
def test_every_linear_collective_is_paired_with_its_adjoint(case):
    run_ranks(identity_holds, case["world"], case)
