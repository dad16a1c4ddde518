"""torch.compile(fullgraph=True): every collective in a graph, forward and backward, equal to eager.

``ALLGRAD_COMPILE=inductor`` compiles all of it with Inductor, ``ALLGRAD_COMPILE="inductor dynamic"`` with
dynamic shapes too; the suite does so with a part, for it takes minutes.
"""

import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import func
from torch._dynamo.backends.common import aot_autograd

import allgrad as ag
from allgrad._autograd.graph_ops import RULES_VERSION
from allgrad._core import graph_internals
from allgrad._core.torch_internals import constant_in_graphs
from calls import CALLS, EVERYTHING, ON_THREE_RANKS, Place
from differentiation import Through
from exactness import leaf, random, same
from places import on

no_compiler = shutil.which("g++") is None and shutil.which("clang++") is None


BACKEND, *SHAPES = os.environ.get("ALLGRAD_COMPILE", "aot_eager").split()


def compiled(fn, backend=BACKEND, **options):
    torch._dynamo.reset()
    if SHAPES:
        options["dynamic"] = True
    return torch.compile(fn, fullgraph=True, backend=backend, **options)


def check_as_eager(fn, *inputs, backend=BACKEND, **options):
    """Value and gradients of the compiled function are those of the plain one."""
    mine = [leaf(x) if x.is_floating_point() else x for x in inputs]
    wanted = [leaf(x) if x.is_floating_point() else x for x in inputs]
    got, want = compiled(fn, backend, **options)(*mine), fn(*wanted)
    same(got.detach(), want.detach(), "the value")
    assert got.requires_grad == want.requires_grad
    if want.requires_grad:
        w = random(want.shape, dist.get_rank())
        (got.sin() * w).sum().backward()
        (want.sin() * w).sum().backward()
        for a, b in zip(mine, wanted, strict=True):
            if b.is_floating_point():
                assert (a.grad is None) == (b.grad is None)
                if b.grad is not None:
                    same(a.grad, b.grad, "the gradient")


@pytest.mark.one_in(4)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_in_a_graph_as_eager(rank, world, name):
    check_in_a_graph(rank, world, name)


@pytest.mark.one_in(3)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_in_a_graph_of_three_ranks_as_eager(rank, world, name):
    check_in_a_graph(rank, world, name)


def check_in_a_graph(rank, world, name):
    case = Through(CALLS[name], Place(rank, world, sizes_given=True))
    check_as_eager(case.function, case.values[case.mine])


def many(at, sizes, x, y):
    """Several collectives in one graph, linear and not, ragged, forward and backward."""
    z = ag.all_gather(x, sizes=sizes, group=at).tanh()
    z = z * ag.all_reduce(y, "max", group=at) + ag.scan(y, group=at)
    z = ag.reduce_scatter(z, op="mean", sizes=sizes, group=at)
    z = ag.shift(ag.all_reduce({"z": z.sum(0), "y": y}, grad="same", group=at)["z"], sizes="equal")
    return z.sin() + ag.broadcast(y, group=at).mean()


SIZES = (2, 1, 3)


@pytest.mark.one_in(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dynamic", [True, False])
def test_several_collectives_in_one_graph(rank, world, dynamic):
    x, y = random((SIZES[rank], 2), rank), random((2,), 10 + rank)
    check_as_eager(lambda x, y: many(None, SIZES[:world], x, y), x, y, dynamic=dynamic)


@pytest.mark.timeout(400)
@pytest.mark.ranks(2, timeout=390)
@pytest.mark.skipif(no_compiler, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("dynamic", [True, False] if EVERYTHING else [False])
def test_inductor(rank, dynamic):
    def few(x, y):
        z = ag.all_gather(x, sizes=SIZES[:2]).tanh()
        return ag.all_reduce(z * ag.share(y), "logsumexp")

    x, y = random((SIZES[rank], 2), rank), random((2,), 10 + rank)
    check_as_eager(few, x, y, backend="inductor", dynamic=dynamic)


@pytest.mark.ranks(2)
def test_one_graph_serves_other_shapes_when_dynamic(rank):
    compiles = []

    def counting(graph, _):
        compiles.append(graph)
        return graph.forward

    run = compiled(
        lambda x: ag.all_reduce(ag.all_gather(x, 1, sizes="equal").sin()),
        aot_autograd(fw_compiler=counting),
        dynamic=True,
    )
    counted = []
    for n in (3, 4, 5):
        x = random((n, 2), rank)
        want = ag.all_reduce(ag.all_gather(x, 1).sin())
        same(run(leaf(x)).detach(), want.detach(), f"{n} rows")
        counted.append(len(compiles))
    assert counted == [2, 2, 2]  # forward and backward, at the first call


@pytest.mark.parametrize("where", ["ranks 1 and 3 of 4", "axis of a 2 x 2 mesh", "mesh of 3"])
def test_groups(where):
    on(where, in_group)


def in_group(group):
    rank = dist.get_rank()
    x = random((2, 2), rank)

    def run(x):
        y = ag.broadcast(x, 1, group=group) * ag.all_reduce(x, group=group)
        return ag.all_gather(y, sizes="equal", group=group) + ag.reduce(x, 1, group=group).sum()

    check_as_eager(run, x)


@pytest.mark.ranks(3)
def test_nests_in_a_graph(rank):
    def run(x, y):
        n = torch.arange(2)
        got = ag.all_gather({"a": [x, n], "b": (y,)}, sizes="equal")
        return got["a"][0].sum(0) * got["b"][0].sum() + got["a"][1].sum()

    check_as_eager(run, random((2, 3), rank), random((2,), 5 + rank))


def captured(fn, *inputs):
    """The names of the ops in the graphs that AOTAutograd hands to a backend, forward and backward."""
    graphs = []

    def keep(graph, _):
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([str(n.args[1] if "effects" in str(n.target) else n.target) for n in calls])
        return graph.forward

    compiled(fn, aot_autograd(fw_compiler=keep))(*inputs).sum().backward()
    return graphs


@pytest.mark.ranks(2, 3)
def test_graphs_hold_one_op_for_a_call(rank):
    """Forward and backward, in order; and one more where sizes are found out."""
    x = leaf(random((2, 2), rank))
    run, exchange = (f"allgrad_{RULES_VERSION}.{name}.default" for name in ("run", "exchange"))
    expected = {
        ag.all_reduce: [run],
        ag.all_gather: [exchange, run],
        ag.shift: [exchange, run],
        ag.broadcast: [run],
    }
    for call, ops in expected.items():
        forward, backward = captured(lambda x, call=call: call(x.sin()), x)
        assert [op for op in forward if "allgrad" in op] == ops
        assert [op for op in backward if "allgrad" in op] == [run]


@pytest.mark.ranks(2, 3)
def test_contrastive_step(rank, world):
    """all_gather + cross-entropy: the step most programs compile."""

    def step(a, b, temperature):
        everyone = ag.all_gather(b, sizes=SIZES[:world])
        labels = torch.arange(a.shape[0]) + sum(SIZES[:rank])
        return nnf.cross_entropy(a @ everyone.T * temperature.exp(), labels)

    n = SIZES[rank]
    check_as_eager(step, random((n, 4), rank), random((n, 4), 9 + rank), random((), 3))


@pytest.mark.ranks(2, 3)
def test_ddp_training_step(rank, world):
    """A whole training step under DistributedDataParallel, compiled and not: the same parameters."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4).double()

        def forward(self, x):
            z = nnf.normalize(self.layer(x))
            return z @ ag.all_gather(z, sizes=SIZES[:world]).T

    def train(wrap):
        torch.manual_seed(0)
        net = Net()
        model = wrap(torch.nn.parallel.DistributedDataParallel(net))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(random((SIZES[rank], 4), 7 * step + rank)).square().sum().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    torch._dynamo.reset()
    same(
        train(lambda m: torch.compile(m, backend=BACKEND, dynamic=bool(SHAPES) or None)),
        train(lambda m: m),
        "parameters",
    )


@pytest.mark.ranks(2, 3)
def test_piece_without_gradient_takes_part(rank, world):
    """Only rank 0's piece requires grad; backward runs on all of them."""
    for name in ("all_reduce sum", "all_reduce max", "all_gather", "shift", "scan sum", "gather"):
        call = CALLS[name]
        x = random(call.shapes(world)[rank], rank).requires_grad_(rank == 0)
        at = Place(rank, world, sizes_given=True)
        y = compiled(lambda x, call=call, at=at: call.run(at, x))(x)
        assert y.requires_grad
        y.square().sum().backward()
        assert (x.grad is not None) == (rank == 0)


@pytest.mark.ranks(2, 3)
def test_gradient_that_needs_none_takes_part_in_the_next(rank):
    """Where a backend keeps the graph of autograd: rank 0's own gradient depends on nothing."""

    def by_weight(call):
        x, w = leaf(random((3,), rank)), leaf(random((3,), 5 + rank))
        y = call(x)
        loss = y.sum() if rank == 0 else (y * w).sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        g.square().sum().backward()
        return w.grad

    got, want = by_weight(compiled(ag.all_reduce, "eager")), by_weight(ag.all_reduce)
    assert (want is None) == (got is None) == (rank == 0)
    if want is not None:
        same(got, want, "the second derivative")


@pytest.mark.ranks(2)
def test_graphs_are_guarded_by_state_alone(rank):
    """Not by the functions, classes and modules of allgrad, which no program changes."""
    guarded = []

    @constant_in_graphs
    def keep():
        context = torch._guards.TracingContext.get().guards_context
        guarded.extend(g.name for g in context.dynamo_guards if "__import_allgrad" in g.name)

    def run(x):
        y = ag.all_reduce(x)
        keep()
        return y

    compiled(run)(leaf(random((3,), rank)))
    assert not [name for name in guarded if name.endswith((".resolve", ".Call", ".torch"))]
    for state in ("transforms']._find_chain", ".group.WORLD", "._current_level"):
        assert any(name.endswith(state) for name in guarded), state
    assert len(guarded) < 40, "\n".join(guarded)
    with ag.lockstep():  # its state is a function
        assert not graph_internals._is_on_own_code(
            "G['__import_allgrad_dot__autograd_dot_transforms']._find_chain"
        )


@pytest.mark.ranks(3)
@pytest.mark.parametrize("op", ["prod", "logsumexp"])
def test_second_derivative_of_a_linear_loss(rank, op):
    """Also the first rank, and those off dst, come to every call of the graph again."""

    def twice(x):
        def total(x):
            return ag.scan(x, op, exclusive=True).sum() + ag.reduce(x, 1, op).sum()

        return func.grad(lambda x: func.grad(total)(x).square().sum())(x)

    x = random((3,), rank)
    same(compiled(twice)(x), twice(x), "the second derivative")


@pytest.mark.ranks(3)
def test_rank_that_sends_or_gets_nothing_takes_part(rank, world):
    """To second order, where the graph itself is differentiated."""
    for pairs in ([(0, 1)], [(2, 0), (0, 2)]):

        def run(x, pairs=pairs):
            y = ag.permute(x, pairs, sizes="equal")
            return ag.scan(y.sin(), exclusive=True)

        def slope(x, run=run):
            return func.grad(lambda x: run(x).square().sum())(x)

        x = random((2,), rank)
        check_as_eager(slope, x)


FINDING_SIZES = ("all_gather", "all_gather, same", "all_to_all", "gather", "permute", "shift")


@pytest.mark.one_in(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", FINDING_SIZES)
def test_sizes_are_found_out_in_a_graph(rank, world, name):
    case = Through(CALLS[name], Place(rank, world))
    check_as_eager(case.function, case.values[case.mine])


@pytest.mark.ranks(2, 3)
def test_sizes_themselves_in_a_graph(rank, world):
    def run(x):
        sizes = ag.gather_sizes(x)
        whole = ag.reduce_scatter(ag.all_gather(x).sin(), sizes=sizes)
        return whole * sizes[0] + ag.scatter(x if rank == 1 else x[:0], 1).sum()

    check_as_eager(run, random((SIZES[rank], 2), rank))


@pytest.mark.ranks(2)
def test_bad_input_is_told_while_tracing(rank):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"SizesError.*add up to 3"):
        compiled(lambda x: ag.split(x, sizes=(1, 2)))(torch.ones(4))


@pytest.mark.ranks(2)
def test_gradient_penalty_through_a_compiled_slope(rank):
    """func.grad inside the graph, autograd outside: the second order is there."""
    x = random((3,), rank)
    check_as_eager(func.grad(lambda x: ag.all_reduce(x.sin()).square().sum()), x)


@pytest.mark.ranks(2)
def test_result_may_be_changed_in_place(rank):
    def run(x):
        y = ag.all_reduce(x)
        y /= 2
        return y + x

    check_as_eager(run, random((3,), rank))


@pytest.mark.ranks(2)
def test_no_grad_in_a_graph(rank):
    x = random((3,), rank)

    @torch.no_grad()
    def run(x):
        return ag.all_reduce(x)

    got = compiled(run)(leaf(x))
    assert not got.requires_grad
    same(got, ag.all_reduce(x).detach(), "the value")


@pytest.mark.ranks(2)
def test_dual_numbers_of_a_piece_without_tangent(rank):
    x = random((3,), rank)
    t = random((3,), 5)

    def run(x):
        return func.jvp(lambda y: ag.all_reduce(y if rank == 0 else x) + y, (x,), (t,))[1]

    same(compiled(run)(x).detach(), 2 * t, "the tangent")


@pytest.mark.ranks(2)
def test_complex_numbers_in_a_graph(rank):
    """Two real numbers each travel, ragged as well, to whoever they belong."""

    def run(x):
        z = torch.complex(x, x.sin())
        y = ag.all_gather(z, sizes=(2, 1)) * ag.all_reduce(z.sum(), grad="same")
        y = ag.split(y, sizes=(2, 1)) + ag.shift(ag.broadcast(z[:1], grad="same"), sizes="equal")
        return torch.view_as_real(y * y.conj() * 1j + y)

    check_as_eager(run, random(((2, 1)[rank], 2), rank))


@pytest.mark.ranks(2)
def test_eager_code_inside_a_compiled_transform(rank):
    """Where a graph breaks inside torch.func, TorchDynamo must not trace what a collective sends."""

    def loss(x):
        torch._dynamo.graph_break()
        return ag.all_reduce(ag.all_gather(x.sin(), sizes=SIZES[:2]), "max").exp().sum()

    x = random((SIZES[rank], 2), rank)
    torch._dynamo.reset()
    got = torch.compile(func.grad(loss), backend="aot_eager")(x)
    same(got, func.grad(loss)(x), "the gradient")
