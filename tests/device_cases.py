"""Cases that run on ranks whose tensors are on one device, and check themselves against one process.

Each takes the device. Many run in one start of the ranks: a case that fails on a rank raises with
its name, and the rest is not run. The same cases run over Gloo on the host and over NCCL on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import allgrad as ag
import reference
from calls import CALLS, KINDS, Place
from differentiation import RANK, WANTED, Through
from exactness import pieces, random, same

MODES = ("backward", "grad(grad)", "jvp")  # of every call
MORE_MODES = ("jacrev", "vmap", "grad(vmap)", "jvp(grad)", "dual numbers")  # of each kind
COMPILED = ("all_reduce sum", "all_gather", "reduce_scatter sum", "all_to_all", "broadcast")


def on(device, call, **about):
    """The call with its tensors on the device; what goes in and comes out is on the host."""
    return replace(call, run=lambda at, x: call.run(at, x.to(device)).to("cpu"), **about)


def place(**about):
    return Place(
        dist.get_rank(about.get("group")), dist.get_world_size(about.get("group")), **about
    )


def mode_case(name, mode, sizes_given, *, compiled=False, group=None):
    def case(device):
        through = Through(
            on(device, CALLS[name]), place(sizes_given=sizes_given, group=group and group())
        )
        f = through.function
        if compiled and dist.get_rank():  # rank 0 stays eager beside the others
            torch.compiler.reset()  # or cases of one function reach Dynamo's limit
            f = torch.compile(f, fullgraph=True, backend="aot_eager")
        got = RANK[mode](f, through.loss, through.data())
        same(got.detach(), WANTED[mode](through), f"{name}, {mode}")

    return case


CASES = {
    "modes": {
        f"{name}: {mode}, {'given' if given else 'found'}": mode_case(name, mode, given)
        for number, name in enumerate(CALLS)
        for mode, given in zip(MODES, (number % 2 == 0, number % 2 == 1, True), strict=True)
    },
    "more modes": {
        f"{name}: {mode}": mode_case(name, mode, True) for name in KINDS for mode in MORE_MODES
    },
    "compiled": {
        f"{name}: {mode}, compiled": mode_case(name, mode, False, compiled=True)
        for name in COMPILED
        for mode in ("backward",)
    },
}


# ---- variants ---------------------------------------------------------------------------------


def variant(group):
    """Add a function to the cases of this group."""

    def add(function):
        CASES.setdefault(group, {})[function.__name__.replace("_", " ")] = function
        return function

    return add


def ragged(dim=0, width=3):
    held = (2, 0, 3, 1)[: dist.get_world_size()]
    shapes = [(n, width) if dim == 0 else (width, n) for n in held]
    return pieces(shapes), held


def derivative(y, x):
    """Of a loss that has other weights on every rank."""
    weights = torch.linspace(1, 2 + dist.get_rank(), y.numel(), dtype=y.dtype, device=y.device)
    return torch.autograd.grad((weights.view(y.shape) * y).sin().sum(), x)[0]


def wanted(function, xs):
    """Every rank's result and gradient in one process."""
    xs = [x.clone().requires_grad_() for x in xs]
    ys = function(xs)
    total = 0
    for rank, y in enumerate(ys):
        weights = torch.linspace(1, 2 + rank, y.numel(), dtype=y.dtype).view(y.shape)
        total = total + (weights * y).sin().sum()
    gs = torch.autograd.grad(total, xs, allow_unused=True, materialize_grads=True)
    return [y.detach() for y in ys], gs


def compare(device, call, function, xs):
    rank = dist.get_rank()
    x = xs[rank].to(device).requires_grad_()
    y = call(x)
    ys, gs = wanted(function, xs)
    same(y.detach().cpu(), ys[rank], "the value")
    same(derivative(y, x).cpu(), gs[rank], "the gradient")


@variant("variants")
def other_dim(device):
    xs, _ = ragged(1)
    compare(device, lambda x: ag.all_gather(x, 1), lambda xs: reference.all_gather(xs, 1), xs)


@variant("variants")
def transposed_memory(device):
    xs = [random((3, 4), r) for r in range(dist.get_world_size())]
    compare(device, lambda x: ag.all_reduce(x.T).T, lambda xs: reference.all_reduce(xs, "sum"), xs)


@variant("variants")
def async_calls_in_another_order(device):
    xs, _ = ragged()

    def call(x):
        first, second = ag.all_gather(x, async_op=True), ag.all_gather(2 * x, async_op=True)
        doubled = second.wait()
        return first.wait() + doubled

    compare(device, call, lambda xs: [3 * y for y in reference.all_gather(xs)], xs)


@variant("variants")
def nest_of_two_dtypes(device):
    rank, world = dist.get_rank(), dist.get_world_size()
    nest = {
        "a": torch.full((rank + 1, 2), float(rank), dtype=torch.float64, device=device),
        "b": [torch.full((2,), rank, dtype=torch.int64, device=device)],
    }
    got = ag.all_gather(nest)
    assert got["a"].shape == (sum(range(1, world + 1)), 2)
    assert got["b"][0].tolist() == [r for r in range(world) for _ in range(2)]
    assert got["a"].requires_grad


@variant("variants")
def dtypes_travel(device):
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.complex64):
        x = torch.full((rank + 1,), rank % 2, dtype=dtype, device=device)
        want = torch.cat([torch.full((r + 1,), r % 2, dtype=dtype) for r in range(world)])
        assert torch.equal(ag.all_gather(x, grad="none").cpu(), want), dtype
    total = ag.all_reduce(torch.ones(5, dtype=torch.bfloat16, device=device))
    assert total.tolist() == [world] * 5


@variant("variants")
def lockstep_with_a_rank_that_has_no_loss(device):
    rank, world = dist.get_rank(), dist.get_world_size()
    x = random((2,), rank).to(device).requires_grad_()
    with ag.lockstep() as step:
        y = ag.all_reduce(x)
        ag.all_gather(y)  # not used
    step.backward(y.sum() if rank else None)
    same(x.grad.cpu(), torch.full((2,), world - 1.0, dtype=torch.float64), "the gradient")


@variant("variants")
def checked_calls(device):
    xs, held = ragged()
    with ag.checked():
        compare(device, ag.all_gather, reference.all_gather, xs)
        compare(device, lambda x: ag.all_gather(x, sizes=held), reference.all_gather, xs)


@variant("variants")
def calls_within_a_deadline(device):
    xs, _ = ragged()
    with ag.deadline(60):
        compare(device, ag.all_gather, reference.all_gather, xs)


@variant("variants")
def scatter_from_none(device):
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = random((2 * world + 1, 2), 9)
    want = reference.scatter(whole, world, 0)[rank]
    for elsewhere in (None, torch.zeros(2)):  # on the host, where a group may have a backend too
        y = ag.scatter(whole.to(device) if rank == 1 else elsewhere, 1)
        assert y.device.type == device
        same(y.detach().cpu(), want, "the piece")


@variant("variants")
def widths_that_differ_raise_on_every_rank(device):
    rank = dist.get_rank()
    try:
        ag.all_gather(torch.ones(2, 3 + rank, device=device))
    except ag.errors.PieceMismatch:
        pass
    else:
        raise AssertionError("no error")
    assert ag.all_reduce(torch.ones(1, device=device), grad="none").item() == dist.get_world_size()


# ---- groups -----------------------------------------------------------------------------------


def check_group(device, group):
    """A ragged all_gather and a sum among the ranks of a group."""
    members = dist.get_process_group_ranks(group)
    rank = members.index(dist.get_rank())
    xs = pieces([(n, 2) for n in (1, 3, 0, 2)[: len(members)]])
    x = xs[rank].to(device).requires_grad_()
    y = ag.all_gather(x, group=group)
    same(y.detach().cpu(), torch.cat(xs), "the value")
    (g,) = torch.autograd.grad(y.sum(), x)
    same(g.cpu(), torch.full_like(xs[rank], len(members)), "the gradient")
    assert ag.all_reduce(torch.ones(3, device=device), group=group)[0].item() == len(members)


@variant("groups")
def pairs_of_ranks(device):
    world = dist.get_world_size()
    made = [dist.new_group([r, r + 1]) for r in range(0, world, 2)]
    check_group(device, made[dist.get_rank() // 2])


@variant("groups")
def axes_of_a_mesh(device):
    world = dist.get_world_size()
    mesh = init_device_mesh(torch.device(device).type, (2, world // 2), mesh_dim_names=("a", "b"))
    rank = dist.get_rank()
    for axis in ("a", "b"):
        x = torch.full((2,), float(rank), device=device, requires_grad=True)
        y = ag.all_reduce(x, group=(mesh, axis))
        ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        assert y.tolist() == [float(sum(ranks))] * 2
        (g,) = torch.autograd.grad(y.sum(), x)
        assert g.tolist() == [float(len(ranks))] * 2
    check_group(device, mesh.get_group("a"))


@variant("groups")
def group_that_starts_with_its_first_call(device):
    """Communicators of NCCL are made by the first call: here a backward, on a fresh group."""
    group = dist.new_group()
    x = torch.ones(2, device=device, requires_grad=True)
    (g,) = torch.autograd.grad(ag.share(x, group=group).sum(), x)
    assert g.tolist() == [float(dist.get_world_size())] * 2


# ---- on a CUDA device only --------------------------------------------------------------------


def split_of_the_world(device):
    """split_group shares the resources of a communicator that torch starts with the world.

    torch knows the ranks of the first world of a process alone: of a later one it reads past an empty
    list, and ends in SIGSEGV, unless the options tell them.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    options = dist.ProcessGroupNCCL.Options()
    options.global_ranks_in_group = list(range(world))
    store = dist.PrefixStore("with a device", dist.group.WORLD.get_group_store())
    dist.destroy_process_group()
    here = torch.device(device, torch.cuda.current_device())
    about = {"store": store, "rank": rank, "world_size": world, "device_id": here}
    dist.init_process_group("nccl", **about, pg_options=options)
    group = dist.split_group(split_ranks=[[r, r + 1] for r in range(0, world, 2)])
    check_group(device, group)


def capture_with_sizes_given(device):
    """Calls in a CUDA graph; the replay sees new values."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), float(rank), device=device)

    def step():
        total = ag.all_reduce(x, grad="none")
        return ag.all_gather(total + x, sizes="equal", grad="none")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread asks for events meanwhile, which would end a capture of all threads.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step()
    for offset in (0.0, 10.0):
        x.fill_(rank + offset)
        graph.replay()
        total = sum(r + offset for r in range(world))
        want = [total + r + offset for r in range(world) for _ in range(4)]
        assert out.tolist() == want


def no_call_waits_for_the_device(device):
    """With sizes given, forward and backward: a wait of the host for the device raises."""
    world = dist.get_world_size()
    x = torch.ones(world, 2, device=device, requires_grad=True)
    sizes = [1] * world
    calls = {
        "all_reduce": ag.all_reduce,
        "all_reduce, max": lambda x: ag.all_reduce(x, "max"),
        "all_gather": lambda x: ag.all_gather(x, sizes="equal"),
        "all_gather, given": lambda x: ag.all_gather(x, sizes=[world] * world),
        "all_gather, dim 1": lambda x: ag.all_gather(x, 1, sizes="equal"),
        "reduce_scatter": lambda x: ag.reduce_scatter(x, sizes="equal"),
        "reduce_scatter, given": lambda x: ag.reduce_scatter(x, sizes=sizes),
        "all_to_all": lambda x: ag.all_to_all(x, send_sizes="equal"),
        "all_to_all, given": lambda x: ag.all_to_all(x, send_sizes=sizes, recv_sizes=sizes),
        "broadcast": ag.broadcast,
        "reduce": ag.reduce,
        "gather": lambda x: ag.gather(x, sizes="equal"),
        "shift": lambda x: ag.shift(x, sizes="equal"),
        "scan": ag.scan,
        "share": ag.share,
        "split": lambda x: ag.split(x, sizes="equal"),
        "async": lambda x: ag.all_gather(x, sizes="equal", async_op=True).wait(),
        "nest": lambda x: ag.all_gather([x, 2 * x], sizes="equal")[1],
    }
    for _ in range(2):  # first calls may allocate, and start communicators
        for name, call in calls.items():
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("default" if _ == 0 else "error")
            try:
                call(x).sum().backward()
            except RuntimeError as error:
                raise AssertionError(f"{name}: {error}") from error
            finally:
                torch.cuda.set_sync_debug_mode("default")


# One by one: what goes wrong here may leave the device unusable.
ON_CUDA = {
    "cuda graph": {"capture with sizes given": capture_with_sizes_given},
    "no waiting": {"no call waits for the device": no_call_waits_for_the_device},
    "split group": {"split of the world": split_of_the_world},
}
CASES |= ON_CUDA


# ---- losses -----------------------------------------------------------------------------------


def loss_case(name, kind, **options):
    def case(device):
        from losses.pairs import LOSSES, NEGATIVES, PAIRS, batch

        loss, formula, given = LOSSES[name]
        rank, world = dist.get_rank(), dist.get_world_size()
        counts = PAIRS[kind][:world]
        whole = batch(name, counts)
        want = formula(*whole, **given)
        want.backward()
        own = [x.detach().to(device).requires_grad_() for x in batch(name, counts, rank)]
        got = loss(*own, **given, **options)
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-10, atol=1e-14)
        got.backward()
        for number, (x, w) in enumerate(zip(own, whole, strict=True)):
            if x.dim():
                sizes = list(NEGATIVES[:world] if number == 3 else counts)
                expected = world * w.grad.split(sizes)[rank]
                torch.testing.assert_close(x.grad.cpu(), expected, rtol=1e-10, atol=1e-14)

    return case


CASES["losses"] = {
    f"{name}, {kind}{', ring' if ring else ''}": loss_case(name, kind, ring=ring)
    for name in ("clip", "clip, smoothed", "siglip", "info_nce", "info_nce, negatives")
    for kind, ring in (("equal", False), ("ragged", False), ("empty", True))
}


@dataclass(frozen=True)
class Batch:
    """Runs the cases of one group on this rank; the names of those that are done."""

    group: str
    device: str

    def __call__(self):
        done = []
        for name, case in CASES[self.group].items():
            try:
                case(self.device)
            except Exception as error:
                raise AssertionError(f"{self.group}: {name}, after {len(done)} cases") from error
            done.append(name)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return done
