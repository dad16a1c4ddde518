"""torch.func, dual numbers and autograd, each through each collective, against one process."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import allgrad as ag
from allgrad._wire import primitives as wire
from calls import CALLS, ON_THREE_RANKS, Place
from counting import Counted
from differentiation import MODES, RANK, WANTED, Through
from exactness import random, same

LINEAR = [name for name, call in CALLS.items() if call.kind in {"each", "alike"}]


@pytest.mark.one_in(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_every_mode_is_exact(rank, world, name):
    check_every_mode(rank, world, name)


@pytest.mark.one_in(4)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_every_mode_is_exact_on_three_ranks(rank, world, name):
    check_every_mode(rank, world, name)


def check_every_mode(rank, world, name):
    case = Through(CALLS[name], Place(rank, world))
    for mode in MODES:
        got = RANK[mode](case.function, case.loss, case.data())
        same(got.detach(), WANTED[mode](case), mode)


@pytest.mark.ranks(2, 3)
def test_vmap_sends_one_message_for_the_whole_batch(rank, world):
    for name in LINEAR:
        case = Through(CALLS[name], Place(rank, world, sizes_given=True))
        batch = random((7, 4), rank)
        with Counted() as one:
            RANK["grad"](case.function, case.loss, case.data())
        with Counted() as many:
            func.vmap(func.grad(lambda v, case=case: case.loss(case.function(v))))(batch)
        assert many == one, name
        with Counted() as nested:
            func.vmap(func.vmap(case.function))(batch.expand(2, 7, 4))
        assert len(nested) < len(one), name  # without the backward


@pytest.mark.ranks(2)
def test_forward_mode_sends_values_and_tangents_once_each():
    x, t = random((3,), 1), random((3,), 2)
    with Counted() as calls:
        func.jvp(ag.all_reduce, (x,), (t,))
    assert calls == ["all_reduce"] * 2
    with Counted() as calls, forward_ad.dual_level():
        ag.all_reduce(forward_ad.make_dual(x, t))
    assert calls == ["all_reduce"] * 2
    with Counted() as calls:
        func.jacfwd(ag.all_reduce)(x)
    assert calls == ["all_reduce"] * 2
    with Counted() as calls:
        func.jvp(lambda x: func.jvp(ag.all_reduce, (x,), (t,))[1], (x,), (t,))
    assert calls == ["all_reduce"] * 4


def dual(run, x, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(run(forward_ad.make_dual(x, t))).tangent


WITH_TANGENTS = {
    "jvp": lambda run, x, t: func.jvp(run, (x,), (t,))[1],
    "dual numbers": dual,
    "vmap(jvp)": lambda run, x, t: func.vmap(lambda t: func.jvp(run, (x,), (t,))[1])(t[None])[0],
    "jvp(vmap)": lambda run, x, t: func.jvp(func.vmap(run), (x[None],), (t[None],))[1][0],
    "vmap of dual numbers": lambda run, x, t: dual(func.vmap(run), x[None], t[None])[0],
}


@pytest.mark.ranks(2, 3)
def test_piece_without_tangent_takes_part(rank, world):
    """On the last rank the piece is a constant; the others' tangents arrive there all the same."""
    xs = [random((3,), r) for r in range(world)]
    ts = [random((3,), 10 + r) for r in range(world)]

    def run(x):
        return ag.all_reduce(x if rank < world - 1 else xs[rank].clone())

    for mode, differentiate in WITH_TANGENTS.items():
        same(differentiate(run, xs[rank], ts[rank]).detach(), sum(ts[:-1]), mode)


OVER_REVERSE = {
    "jvp(grad)": lambda slope, x, t: func.jvp(slope, (x,), (t,))[1],
    "grad over dual numbers": dual,
}


@pytest.mark.ranks(2, 3)
def test_piece_without_tangent_takes_part_in_reverse_mode(rank, world):
    """The last rank differentiates where its piece has no tangent."""
    xs = [random((3,), r) for r in range(world)]
    ts = [random((3,), 10 + r) for r in range(world)]

    def slope(x):
        at = x if rank < world - 1 else xs[rank]
        return func.grad(lambda x: ag.all_reduce(x).pow(3).sum() / 3)(at)

    want = world * 2 * sum(xs) * sum(ts[:-1])
    for mode, differentiate in OVER_REVERSE.items():
        same(differentiate(slope, xs[rank], ts[rank]).detach(), want, mode)


@pytest.mark.ranks(2)
def test_dual_numbers_inside_grad(rank):
    xs = [random((3,), r) for r in range(2)]

    def directional(x):
        return (dual(lambda x: ag.all_reduce(x.square()), x, x) * (rank + 1)).sum()

    same(func.grad(directional)(xs[rank]).detach(), 3 * 4 * xs[rank], "grad of a tangent")


@pytest.mark.ranks(2, 3)
def test_piece_without_batch_takes_part(rank, world):
    """On the last rank the piece is the same for the whole batch."""
    batches = [random((5, 3), r) for r in range(world)]
    last = rank == world - 1
    constant = random((3,), 99)

    def run(x):
        return ag.all_reduce(constant if last else x)

    want = sum(batches[:-1]) + constant
    same(func.vmap(run)(batches[rank]).detach(), want, "a batch")
    nested = func.vmap(func.vmap(run))(batches[rank].expand(2, 5, 3))
    same(nested.detach(), want.expand(2, 5, 3), "a batch of batches")


@pytest.mark.ranks(2)
def test_gradient_without_batch_takes_part(rank, world):
    """A rank whose loss does not depend on the batch sends its gradient back for all of it."""
    batch = random((4, 3), rank)

    def loss(x):
        y = ag.all_reduce(x)
        return y.sum() if rank == 0 else (y * x.detach()).sum()

    got = func.vmap(func.grad(loss))(batch).detach()
    same(got, 1 + random((4, 3), 1), "the gradient")


@pytest.mark.ranks(2)
def test_no_gradient_means_none_in_every_mode(rank, world):
    x, t = random((2, 3), rank).requires_grad_(), random((2, 3), 9)
    total = sum(random((2, 3), r) for r in range(world))
    for call, want in (
        (lambda x: ag.all_reduce(x, grad="none"), total),
        (lambda x: ag.all_gather(x, sizes="equal", grad="none"), None),
        (lambda x: ag.broadcast(x, grad="none"), random((2, 3), 0)),
    ):
        with Counted() as calls:
            value, tangent = func.jvp(call, (x,), (t,))
            assert not call(x).requires_grad
            assert not func.vmap(call)(x).requires_grad
            assert not func.grad(lambda x, call=call: (call(x) * 2).sum())(x).any()
            assert not func.jacfwd(call)(x).any()
        assert len(calls) == 5  # one for each value, none for a derivative
        assert not tangent.any()
        if want is not None:
            same(value.detach(), want, "the value")
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(x.detach(), t))).tangent
            assert not tangent.any()


@pytest.mark.ranks(2)
def test_piece_without_tangent_takes_part_where_there_is_no_gradient(rank):
    x, t = random((3,), 1), random((3,), 2)
    _, tangent = func.jvp(
        lambda x: ag.all_reduce(x if rank else torch.ones(3).double(), grad="none") + x, (x,), (t,)
    )
    same(tangent, t, "the tangent of the rest")


@pytest.mark.ranks(3)
def test_nests_and_whole_numbers_go_through_every_transform(rank, world):
    counts = torch.arange(2) + rank

    def run(x):
        done = ag.all_gather({"x": x, "n": counts, "y": [x.sum()]})
        assert done["n"].dtype == torch.int64
        return done["x"].sum() * done["y"][0].square().sum() + done["n"].sum()

    def whole(x):
        return world * x.sum() * world * x.sum().square() + 9

    x, t = random((2,), 5), random((2,), 6)
    want_grad, want_jvp = func.grad(whole)(x), func.jvp(whole, (x,), (t,))[1]
    same(func.grad(run)(x).detach(), world * want_grad / world, "grad")
    same(func.jvp(run, (x,), (t,))[1].detach(), want_jvp, "jvp")
    batched = func.vmap(run)(torch.stack([x, t])).detach()
    same(batched, torch.stack([whole(x), whole(t)]), "vmap")


@pytest.mark.ranks(2)
def test_complex_numbers_go_through_every_transform(rank):
    x = random((3,), rank, torch.complex128)
    t = random((3,), 10 + rank, torch.complex128)
    both = sum(random((3,), 10 + r, torch.complex128) for r in range(2))
    same(func.jvp(ag.all_reduce, (x,), (t,))[1].detach(), both, "jvp")
    same(func.vjp(ag.all_reduce, x)[1](t)[0].detach(), both, "vjp")
    same(func.vmap(ag.all_reduce)(t[:, None]).detach(), both[:, None], "vmap")


@pytest.mark.ranks(2)
def test_messages_made_inside_a_transform(rank, world):
    """As the lengths of pieces on a GPU are, which are copied there inside the transform."""

    def loss(x):
        call = wire.resolve("all_gather", None, lambda: "")
        found = wire.all_gather(call, torch.full((1,), rank).clone(), (1,) * world)
        return (x * found).sum()

    gradient = func.grad(loss)(torch.ones(1))
    assert gradient.item() == sum(range(world))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", [ag.all_reduce, ag.all_gather, ag.scan])
def test_batches_of_tangents_in_torchs_first_vmap(rank, call):
    """``vectorize=True`` batches tangents with the vmap that torch.func replaced."""

    def f(x):
        return call(x.sin())

    x = torch.arange(3.0, dtype=torch.float64) + rank
    got = torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(got, torch.func.jacfwd(f)(x), rtol=1e-12, atol=1e-12)
    assert ag.all_reduce(torch.ones(1), grad="none").item() == 2
