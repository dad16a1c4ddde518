"""Attention over a split sequence: torch's attention on the joined one."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import allgrad as ag
from allgrad.errors import InputError, SizesError
from allgrad.nn import gathered_attention, ring_attention
from counting import Counted
from exactness import grads, leaf, loss, place, random, same
from nn.twins import LENGTHS, check_twin, close, derivatives, each, pieces_of
from places import everywhere, on
from refusals import raises_everywhere

KINDS = {"ring": ring_attention, "gathered": gathered_attention}
both = pytest.mark.parametrize("kind", KINDS)


def attention(q, k, v, *, causal, scale=None):
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.dim() > 2
        )


def plain(q, k, v, *, causal):
    """The formula, for ranks: torch's choice of kernels cannot be sent to them."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.where(torch.ones_like(scores).tril() > 0, -torch.inf)
    return scores.softmax(-1) @ v


def attend(group, kind, shares, causal, heads, scale):
    _, world = place(group)
    lengths = LENGTHS[shares][:world]
    q_heads, k_heads = heads
    inputs = list(
        zip(
            pieces_of(world, shares, (2, q_heads, 0, 4), 2, 1),
            pieces_of(world, shares, (2, k_heads, 0, 4), 2, 2),
            pieces_of(world, shares, (2, k_heads, 0, 3), 2, 3),
            strict=True,
        )
    )

    def run(xs, _):
        return KINDS[kind](*xs, causal=causal, scale=scale, group=group)

    def whole(everyone, _):
        q, k, v = (torch.cat(parts, 2) for parts in zip(*everyone, strict=True))
        return attention(q, k, v, causal=causal, scale=scale).split(lengths, 2)

    check_twin(run, whole, inputs, group=group)


@pytest.mark.one_in(7)
@both
@everywhere
def test_exact_everywhere(where, kind):
    cases = [
        (kind, "ragged", True, (4, 2), 0.3),
        (kind, "empty", False, (2, 2), None),
        (kind, "empty", True, (3, 1), None),
    ]
    on(where, each, attend, cases)


def cross(group, kind):
    """Queries and keys of different lengths: a rank may have one without the other."""
    _, world = place(group)
    q = [random((2, (3, 0, 2)[r], 4), r) for r in range(world)]
    k = [random((2, (0, 2, 3)[r], 4), 10 + r) for r in range(world)]
    v = [random((2, (0, 2, 3)[r], 4), 20 + r) for r in range(world)]

    def whole(everyone, _):
        q, k, v = (torch.cat(parts, 1) for parts in zip(*everyone, strict=True))
        return attention(q, k, v, causal=False).split([3, 0, 2][:world], 1)

    inputs = list(zip(q, k, v, strict=True))
    check_twin(lambda xs, _: KINDS[kind](*xs, group=group), whole, inputs, group=group)


@both
def test_queries_and_keys_of_other_lengths(kind):
    on("3 ranks", cross, kind)


@both
@pytest.mark.ranks(3)
def test_no_keys_give_zeros(rank, world, kind):
    q = leaf(random((2, rank, 4), rank))
    k = torch.zeros(2, 0, 4, dtype=torch.float64)
    y = KINDS[kind](q, k, k)
    close(y, torch.zeros_like(q), "the output")
    y.sum().backward()


@both
@pytest.mark.ranks(3)
def test_messages(rank, world, kind):
    q, k, v = (leaf(random((2, LENGTHS["ragged"][rank], 4), seed + rank)) for seed in (0, 10, 20))
    sizes = LENGTHS["ragged"][:world]
    with Counted() as calls:
        KINDS[kind](q, k, v, causal=True, sizes=sizes).sum().backward()
    # The two shifts there and back are made beside the program.
    assert calls == (["all_gather", "reduce_scatter"] if kind == "gathered" else ["all_to_all"] * 4)


@pytest.mark.ranks(3)
def test_ring_keeps_no_scores(rank, world):
    """What is saved for backward grows with the length, not with its square."""
    saved = []

    def keep(x):
        saved.append(x.numel())
        return x

    q, k, v = (leaf(random((1, 64, 2), seed + rank)) for seed in (0, 10, 20))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        ring_attention(q, k, v, sizes=[64] * world)
    assert max(saved) <= 64 * 2


@both
@pytest.mark.ranks(2)
def test_forward_mode_and_func(rank, world, kind):
    q, k, v = (random((2, 2 + rank, 3), seed + rank) for seed in (0, 10, 20))
    t = random(k.shape, 30 + rank)
    sizes = [2, 3]

    def value(k):
        return loss(KINDS[kind](q, k, v, causal=True, sizes=sizes), rank)

    _, forward = torch.func.jvp(value, (k,), (t,))
    (want,) = derivatives(value(again := leaf(k)), [again])
    close(torch.func.grad(value)(k), want, "the gradient")
    close(ag.all_reduce(forward), ag.all_reduce((want * t).sum()), "the directional derivative")


@both
def test_backward_twice_over_one_graph(kind):
    q, k, v = (leaf(random((2, 4, 8), seed)) for seed in range(3))
    value = loss(KINDS[kind](q, k, v), 0)
    first = torch.autograd.grad(value, [q, k, v], retain_graph=True)
    second = torch.autograd.grad(value, [q, k, v])
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, [q, k, v])


@both
@pytest.mark.ranks(2)
def test_half_precision(rank, world, kind):
    q, k, v = (random((2, 8, 16), seed + rank) for seed in (0, 10, 20))
    want = KINDS[kind](q, k, v, causal=True)
    got = KINDS[kind](q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.05)


@both
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.ranks(2)
def test_under_autocast(rank, world, kind, backward_inside):
    """As torch's own: results in bfloat16, gradients in the inputs' dtype."""
    everyone = [
        [leaf(random((2, 8, 16), s + r).float()) for s in (0, 10, 20)] for r in range(world)
    ]
    q, k, v = (torch.cat(parts, 1) for parts in zip(*everyone, strict=True))
    whole = scaled_dot_product_attention(q, k, v, is_causal=True)
    want = derivatives(whole.sin().sum(), everyone[rank])
    own = [leaf(x.detach()) for x in everyone[rank]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = KINDS[kind](*own[:2], own[2].bfloat16(), causal=True)  # as behind rotary embeddings
        assert y.dtype == torch.bfloat16
        total = y.float().sin().sum()
        got = derivatives(total, own) if backward_inside else None
    got = got or derivatives(total, own)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.01 * other.norm()


@both
def test_alone_what_is_no_tensor_is_told(kind):
    q = torch.zeros(2, 3, 4)
    for given in ((None, q, q), (q, None, q), (q, q, None)):
        with pytest.raises(InputError, match="not a tensor"):
            KINDS[kind](*given)


@both
@pytest.mark.ranks(3)
def test_heads_that_do_not_fit(rank, world, kind):
    q, k = torch.zeros(4, 2, 3), torch.zeros(4, 2, 3)
    bad = torch.zeros(3, 2, 3)
    name = f"{kind}_attention"
    for wrong, says in (
        ((q, bad, bad), "4 heads of q do not divide by 3 of k"),
        ((q, k, bad), "4 of k, 3 of v"),
        ((q, k, k[:, :1]), "k and v differ in length"),
        ((q[..., :2], k, k), "q and k differ in width"),
        ((q[:, :1], k, k), "causal, but q and k differ in length"),
        ((q[0], k, k), "not of one number of dimensions"),
        ((q, k, k.double()), "not of one floating-point dtype"),
        ((q.int(), k.int(), k.int()), "not of one floating-point dtype"),
    ):
        given = wrong if rank == 1 else (q, k, k)
        raises_everywhere(
            InputError,
            lambda given=given: KINDS[kind](*given, causal=True),
            name,
            "rank 1",
            says,
        )
    for other in (
        (q[:2], k[:2], k[:2]),
        (q, k, k[..., :2]),
        (q.double(), k.double(), k.double()),
    ):
        odd = other if rank == 2 else (q, k, k)
        raises_everywhere(InputError, lambda odd=odd: KINDS[kind](*odd), name, "<- differs")
    odd = [x.expand(2 if rank == 2 else 1, 4, 2, 3) for x in (q, k, k)]
    raises_everywhere(InputError, lambda: KINDS[kind](*odd), name, "batch of 2", "<- differs")
    raises_everywhere(SizesError, lambda: KINDS[kind](q, k, k, sizes=[1, 1, 1]), "2 keys")


def twice(attend, xs):
    """The output, two derivatives of it, and the first again over the graph that was kept."""
    y = attend(*xs, causal=True)
    first = derivatives(y.sin().sum(), xs, graph=True)
    second = torch.autograd.grad(
        sum(g.square().sum() for g in first), xs, retain_graph=True, materialize_grads=True
    )
    return [y, *first, *second, *derivatives(y.sin().sum(), xs)]


FROM = {
    "leaves": lambda q, k, v: (q, k, v),
    "made": lambda q, k, v: (q * 1.5, k.sin(), v.cos()),
    "one tensor": lambda q, _k, _v: (q, q, q),
    "of each other": lambda q, k, v: (q, q.sin(), v + k * q),
}


@both
@pytest.mark.parametrize("inputs", FROM)
@pytest.mark.parametrize("width", [8, 5])
def test_alone_two_derivatives_of_torchs_kernel(kind, inputs, width):
    xs = [leaf(random((2, 2, 6, width), seed)) for seed in range(3)]

    def of(attend):
        return lambda *xs, causal: attend(*FROM[inputs](*xs), causal=causal)

    for got, want in zip(twice(of(KINDS[kind]), xs), twice(of(attention), xs), strict=True):
        close(got, want, "a derivative")


@both
@pytest.mark.parametrize("width", [8, 5])
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 2)])
@pytest.mark.ranks(2)
def test_second_derivatives_by_some_inputs(rank, world, kind, width, wanted):
    """In an own group of one torch's kernel is next to the result; on two ranks keys always need a gradient."""
    whole = [leaf(random((1, 2, 6, width), seed)) for seed in range(3)]

    def penalty(attend, inputs):
        y = attend(*inputs)
        slopes = torch.autograd.grad(y.sin().sum(), [inputs[i] for i in wanted], create_graph=True)
        return slopes, sum(g.square().sum() for g in slopes)

    slopes, value = penalty(lambda *xs: plain(*xs, causal=False), whole)
    want = torch.autograd.grad(value, whole, materialize_grads=True)
    alone, _ = dist.new_subgroups(1)
    for group, pieces in ((alone, 1), (None, 2)):
        own = [leaf(x.chunk(pieces, 2)[rank if group is None else 0]) for x in whole]
        found, value = penalty(lambda *xs: KINDS[kind](*xs, group=group), own)  # noqa: B023
        got = torch.autograd.grad(value, own, materialize_grads=True)
        for a, b in zip([*found, *got], [*slopes, *want], strict=True):
            close(a, b.chunk(pieces, 2)[rank if group is None else 0], "a derivative")


@both
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(2, 3, 1), (2, 0, 3)])
@pytest.mark.ranks(3)
def test_second_derivative_of_a_linear_loss(rank, world, kind, lengths, causal):
    """Also a rank that attends to nothing, or does not see the last keys, comes to every call again."""
    xs = [leaf(random((2, n, 4), r)) for r, n in enumerate(lengths)]
    weights = [random((2, n, 4), 10 + r) for r, n in enumerate(lengths)]
    joined = torch.cat(xs, 1)
    y = plain(joined, 2 * joined, joined.sin(), causal=causal)
    wanted = grads((torch.cat(weights, 1) * y).sum(), xs, graph=True)
    want = grads(sum((w * g).sum() for w, g in zip(weights, wanted, strict=True)), xs)
    x = leaf(xs[rank])
    y = KINDS[kind](x, 2 * x, x.sin(), causal=causal)
    (first,) = grads((weights[rank] * y).sum(), [x], graph=True)
    same(first.detach(), wanted[rank].detach(), "the first derivative")
    same(grads((weights[rank] * first).sum(), [x])[0], want[rank], "the second derivative")


@both
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.ranks(2)
def test_compiled_beside_eager(rank, world, kind, dynamic):
    torch._dynamo.reset()

    def attend(q, sizes):
        return KINDS[kind](q, q, q, causal=True, sizes=sizes)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for sizes in ((3, 4), (2, 5)):
        x = leaf(random((1, 2, sum(sizes), 8), 0))
        want = plain(x, x, x, causal=True)
        own = leaf(x.split(sizes, 2)[rank])
        y = (compiled if rank else attend)(own, sizes)
        close(y, want.split(sizes, 2)[rank], "the output")
        (got,) = derivatives(y.sin().sum(), [own])
        close(got, derivatives(want.sin().sum(), [x])[0].split(sizes, 2)[rank], "the gradient")


@both
@pytest.mark.parametrize("lengths", [(2, 2, 2), (2, 0, 2)])
@pytest.mark.ranks(3)
def test_under_a_checkpoint(rank, world, kind, lengths):
    """A rank that sees none of the last keys computes them again when the others do."""
    for causal in (False, True):
        x = leaf(random((1, 2, sum(lengths), 8), 0))
        want = derivatives(plain(x, x, x, causal=causal).sin().sum(), [x])[0]
        own = leaf(x.split(lengths, 2)[rank])
        y = checkpoint(KINDS[kind], own, own, own, causal=causal, use_reentrant=False)
        (got,) = derivatives(y.sin().sum(), [own])
        close(got, want.split(lengths, 2)[rank], "the gradient")


@both
@pytest.mark.parametrize("lengths", [(2, 1, 3), (2, 0, 3)])
@pytest.mark.ranks(3)
def test_a_batch_of_gradients(rank, world, kind, lengths):
    """is_grads_batched=True: what one gradient at a time gives in one process."""
    for causal in (False, True):
        whole = [leaf(random((2, sum(lengths), 4), seed)) for seed in range(3)]
        batch = random((5, 2, sum(lengths), 4), 9)
        y = plain(*whole, causal=causal)
        each = [torch.autograd.grad(y, whole, one, retain_graph=True) for one in batch]
        own = [leaf(x.split(lengths, 1)[rank]) for x in whole]
        y = KINDS[kind](*own, causal=causal)
        mine = batch.split(lengths, 2)[rank]
        got = torch.autograd.grad(y, own, mine, is_grads_batched=True)
        for x, want in zip(got, map(torch.stack, zip(*each, strict=True)), strict=True):
            close(x, want.split(lengths, 2)[rank], "the gradients")


def test_alone_under_autocast_and_checkpoint():
    xs = [leaf(random((2, 2, 6, 8), seed).float()) for seed in range(3)]

    def cast(*xs, causal):
        with torch.autocast("cpu", torch.bfloat16):
            return ring_attention(*xs, causal=causal)

    def again(*xs, causal):
        return checkpoint(ring_attention, *xs, causal=causal, use_reentrant=False)

    want = twice(attention, xs)
    for attend, loose in ((cast, {"rtol": 0.1, "atol": 0.15}), (again, {})):
        for one, other in zip(twice(attend, xs), want, strict=True):
            torch.testing.assert_close(one.float(), other, **loose)


def test_alone_nothing_outlives_the_graph():
    """Also where backward never ran, and without the garbage collector."""
    x = leaf(random((1, 2, 4, 8), 0))
    for backward in (False, True):
        q = x * 2
        seen = weakref.ref(q)
        y = ring_attention(q, q, q)
        y.register_hook(torch.neg)  # the caller's hooks are the caller's
        if backward:
            (got,) = torch.autograd.grad(y.sum(), x)
            (want,) = torch.autograd.grad(ring_attention(x * 2, x * 2, x * 2).sum(), x)
            close(got, -want, "the gradient")
        gc.disable()
        del q, y
        assert seen() is None
        gc.enable()


@pytest.mark.parametrize("attention", [ring_attention, gathered_attention])
@pytest.mark.ranks(3)
def test_batches_of_torch_vmap(rank, world, attention):
    q, k, v = (random((2, 1, 2, (2, 1, 3)[rank], 4), rank + seed) for seed in (1, 4, 7))
    want = torch.stack([attention(*one) for one in zip(q, k, v, strict=True)])
    close(torch.func.vmap(attention)(q, k, v), want, "the batch")
