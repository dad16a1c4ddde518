"""dispatch and combine: a mixture of experts in one process on the joined tokens."""

from functools import partial
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import allgrad as ag
from allgrad._wire import pairwise, primitives
from allgrad.errors import InputError, PieceMismatch, RankRaised, SizesError, TensorError
from allgrad.nn import combine, dispatch
from counting import Counted
from exactness import place, random
from nn.twins import LENGTHS, check_twin, each, pieces_of
from places import everywhere, on
from refusals import raises_everywhere

WIDTH = 3


def routing_of(tokens, experts, choices, seed=0):
    """Experts of each token, and -1 for none now and then."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-1, experts, (tokens, choices), generator=made)


def with_room(routing, capacity):
    """Which choices an expert takes, in order."""
    taken, kept = {}, []
    for expert in routing.flatten().tolist():
        taken[expert] = taken.get(expert, 0) + 1
        kept.append(expert >= 0 and (capacity is None or taken[expert] <= capacity))
    return torch.tensor(kept, dtype=torch.bool).view(routing.shape)


def mixture(x, gates, weights, routing, capacity):
    """In one process: every expert sees every token, and what was not chosen counts nothing."""
    outputs = torch.stack([(x @ w).tanh() for w in weights], 1)
    kept = with_room(routing, capacity)
    out = x.new_zeros(len(x), outputs.shape[2])
    for choice in range(routing.shape[1]):
        picked = outputs[torch.arange(len(x)), routing[:, choice].clamp(min=0)]
        out = out + picked * (gates[:, choice] * kept[:, choice]).unsqueeze(1)
    return out


def moe(group, kind, choices, capacity, held):
    rank, world = place(group)
    lengths = LENGTHS[kind][:world]
    held = [2] * world if held == "even" else [(1, 0, 3, 1)[r] for r in range(world)]
    number = sum(held)
    experts = number if held == [2] * world else held
    routing = routing_of(sum(lengths), number, choices)
    if choices == 1:
        routing_mine = routing.split(lengths)[rank].flatten()
    else:
        routing_mine = routing.split(lengths)[rank]
    inputs = list(
        zip(
            pieces_of(world, kind, (0, WIDTH), 0),
            pieces_of(world, kind, (0, choices), 0, seed=1),
            strict=True,
        )
    )
    weights = [random((WIDTH, WIDTH + 1), 70 + e) for e in range(number)]

    def run(xs, ps):
        x, gates = xs
        sent = dispatch(x, routing_mine, experts=experts, capacity=capacity, group=group)
        assert len(sent.experts) == held[rank] == len(sent.counts)
        parts = sent.tokens.split(sent.counts)
        made = [(t @ ps[e]).tanh() for t, e in zip(parts, sent.experts, strict=True)]
        y = torch.cat(made) if made else x.new_zeros(0, WIDTH + 1)
        kept = with_room(routing, capacity)
        chosen = (routing >= 0) & ~kept
        assert sent.dropped == chosen.split(lengths)[rank].sum()
        return combine(y, sent, gates if choices > 1 else gates.flatten())

    def whole(everyone, ps):
        x, gates = (torch.cat(parts) for parts in zip(*everyone, strict=True))
        return mixture(x, gates, ps, routing, capacity).split(lengths)

    check_twin(run, whole, inputs, weights, group=group)


@pytest.mark.one_in(4)
@everywhere
def test_exact_everywhere(where):
    on(where, each, moe, [(kind, 2, None, "even") for kind in LENGTHS])


def moe_in_parts(*args):
    """The same with every block of rows in a message of its own."""
    with (
        mock.patch.object(primitives, "PART", 0),
        mock.patch.object(pairwise, "_exchange_parts", wraps=pairwise._exchange_parts) as moved,
    ):
        moe(*args)
    assert moved.called


def test_large_blocks_travel_each_to_its_place():
    cases = [(kind, 2, room, "unequal") for kind, room in product(LENGTHS, (None, 1))]
    on("3 ranks", each, moe_in_parts, cases)


@pytest.mark.parametrize("held", ["even", "unequal"])
def test_capacity_and_experts(held):
    cases = [("ragged", *both, held) for both in product((1, 2), (None, 0, 1, 2))]
    on("3 ranks", each, moe, cases)


@pytest.mark.ranks(3)
def test_tokens_are_in_order_of_expert_rank_and_place(rank, world):
    x = torch.tensor([[10.0 * rank], [10.0 * rank + 1]])
    sent = dispatch(x, torch.tensor([rank, 5 - rank]), experts=6)
    assert sent.experts == range(2 * rank, 2 * rank + 2)
    by_expert = {0: [0], 1: [10], 2: [20], 3: [21], 4: [11], 5: [1]}
    assert sent.tokens.flatten().tolist() == [v for e in sent.experts for v in by_expert[e]]
    assert combine(2 * sent.tokens, sent).tolist() == (2 * x).tolist()


@pytest.mark.ranks(3)
def test_messages(rank, world):
    x = random((4, WIDTH), rank).requires_grad_()
    with Counted() as calls:
        sent = dispatch(x, torch.tensor([0, 1, 2, 0]), experts=3)
        combine(sent.tokens, sent).sum().backward()
    assert calls == ["all_to_all_unsized", *["all_to_all"] * 3]


@pytest.mark.ranks(3)
def test_rows_travel_with_the_counts_where_those_of_all_ranks_are_few(rank, world):
    """One rank with more than a message takes tells all of them; two dispatches later it is over."""
    few, many = random((5, 8), rank), random((700 if rank == 1 else 5, 64), rank)
    with_rows, apart = ["all_to_all_unsized"], ["all_to_all_unsized", "all_to_all"]
    for x, want in ((few, with_rows), (many, apart), (few, apart), (few, with_rows)):
        routing = torch.zeros(len(x), dtype=torch.int64)
        with Counted() as calls:
            sent = dispatch(x, routing, experts=3)
        assert calls == want
        back = combine(sent.tokens.clone(), sent)
        assert torch.equal(back, x)


@pytest.mark.parametrize(
    "layers",
    [
        [(768, [40, 44, 44], None), (512, [80, 90, 86], None)],  # more experts than before
        [(6, [1, 0, 3], 100), (6, [0, 0, 2], None), (6, [0, 0, 2], None)],  # fewer
    ],
    ids=["more", "fewer"],
)
@pytest.mark.ranks(3)
def test_layers_whose_messages_take_equal_memory(rank, world, layers):
    """Of both layers, messages are received into as many bytes, where rows begin at one place."""
    for at, (width, experts, capacity) in enumerate(layers):
        x = random((8, width), 10 * at + rank).float().requires_grad_()
        routing = (torch.arange(8) + rank) % sum(experts)
        sent = dispatch(x, routing, experts=experts, capacity=capacity)
        back = combine(sent.tokens, sent)
        assert (sent.dropped, back.shape) == (0, x.shape)
        assert torch.equal(back, x)
        (back * (rank + 2)).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, rank + 2))


@pytest.mark.ranks(2)
def test_forward_mode_and_func(rank, world):
    x, t = random((4, WIDTH), rank), random((4, WIDTH), 9 + rank)

    def there_and_back(x):
        sent = dispatch(x, torch.tensor([0, 1, -1, rank]), experts=2)
        return combine(sent.tokens.sin(), sent)

    there_and_back(x)  # in plain autograd first: memory is kept between calls
    came = torch.tensor([[1.0], [1.0], [0.0], [1.0]], dtype=x.dtype)
    value, forward = torch.func.jvp(there_and_back, (x,), (t,))
    torch.testing.assert_close(value, x.sin() * came)
    torch.testing.assert_close(forward, x.cos() * t * came)
    torch.testing.assert_close(
        torch.func.grad(lambda x: there_and_back(x).sum())(x), x.cos() * came
    )
    with forward_ad.dual_level():
        dual = there_and_back(forward_ad.make_dual(x, t))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, x.cos() * t * came)
    batch = torch.func.vmap(there_and_back)(torch.stack([x, t]))
    torch.testing.assert_close(batch, torch.stack([x.sin(), t.sin()]) * came)
    batch = torch.func.vmap(torch.func.grad(lambda x: there_and_back(x).sum()))(x[None])
    torch.testing.assert_close(batch, (x.cos() * came)[None])


@pytest.mark.ranks(2)
def test_compiled_around_graph_breaks(rank, world):
    x = random((4, WIDTH), rank)

    def step(x):
        sent = dispatch(2 * x, torch.tensor([0, 1, -1, rank]), experts=2)
        return combine(sent.tokens.sin(), sent)

    eager, compiled = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = step(eager), torch.compile(step, backend="aot_eager")(compiled)
    torch.testing.assert_close(z, y)
    for made in (y, z):
        made.square().sum().backward()
    torch.testing.assert_close(compiled.grad, eager.grad)


DTYPES = (torch.bfloat16, torch.complex128, torch.bool, torch.int32, torch.float8_e5m2)


@pytest.mark.ranks(3)
def test_rows_of_every_dtype_and_an_odd_width(rank, world):
    for dtype in DTYPES:
        x = torch.arange(15 + rank * 3).view(-1, 3).add(rank).to(dtype)
        x = x if rank else x[:0]  # nothing on one rank
        sent = dispatch(x, torch.arange(len(x)) % 6, experts=6)
        back = combine(sent.tokens, sent)
        assert torch.equal(back.view(torch.uint8), x.view(torch.uint8)), dtype
        assert ag.all_reduce(torch.tensor(len(sent.tokens))) == ag.all_reduce(torch.tensor(len(x)))


@pytest.mark.ranks(3)
def test_training_after_inference_mode(rank, world):
    """Messages are received into memory that calls share, in inference mode and outside of it."""
    x, routing = random((4, 5), rank), torch.arange(4) % world
    with torch.inference_mode():
        before = dispatch(x, routing, experts=world)
        assert torch.equal(combine(before.tokens, before), x)
    x = x.requires_grad_()
    sent = dispatch(x, routing, experts=world)
    combine(2 * sent.tokens, sent).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    with torch.inference_mode():
        again = dispatch(x, routing, experts=world)
    assert torch.equal(again.tokens, before.tokens)


@pytest.mark.ranks(3)
def test_expert_that_nobody_has(rank, world):
    x = torch.zeros(2, WIDTH)
    # The largest ones would be counts of experts that fit into no memory.
    for wrong in (3, -2, 10**14, torch.iinfo(torch.int64).max):
        routing = torch.tensor([0, wrong if rank == 1 else 1])
        raises_everywhere(
            InputError,
            lambda routing=routing: dispatch(x, routing, experts=3),
            "experts 0 to 2",
            "rank 1",
            "<- unknown",
        )


@pytest.mark.ranks(3)
def test_routing_that_does_not_fit(rank, world):
    x = torch.zeros(2, WIDTH)
    good = torch.zeros(2, dtype=torch.int64)
    for wrong in (good[:1], good.float(), good.bool(), good.view(1, 2), good.view(2, 1, 1)):
        routing = wrong if rank == 2 else good
        raises_everywhere(
            TensorError, lambda r=routing: dispatch(x, r, experts=3), "dispatch", "<- do not fit"
        )
    mask = torch.eye(3, dtype=torch.bool)[:2]  # of tokens and experts, on every rank
    raises_everywhere(TensorError, lambda: dispatch(x, mask, experts=3), "Give routing as int64")


@pytest.mark.ranks(3)
def test_options_that_differ_between_ranks(rank, world):
    x, routing = torch.zeros(2, WIDTH), torch.tensor([1, 1])
    wide = torch.zeros(2, WIDTH + (rank == 1))
    raises_everywhere(
        PieceMismatch, lambda: dispatch(wide, routing, experts=3), "4 features", "<- differs"
    )
    double = x.double() if rank == 0 else x
    raises_everywhere(
        PieceMismatch, lambda: dispatch(double, routing, experts=3), "float64", "<- differs"
    )
    held = [1, 2, 0] if rank == 2 else [1, 1, 1]
    raises_everywhere(PieceMismatch, lambda: dispatch(x, routing, experts=held), "<- differs")
    more = 6 if rank == 1 else 3
    raises_everywhere(PieceMismatch, lambda: dispatch(x, routing, experts=more), "<- differs")
    raises_everywhere(
        PieceMismatch, lambda: dispatch(x, routing, experts=3, capacity=5 + rank // 2), "capacity=6"
    )


@pytest.mark.ranks(3)
def test_no_room(rank, world):
    x, routing = torch.zeros(2, WIDTH), torch.tensor([1, 1])
    raises_everywhere(
        InputError,
        lambda: dispatch(x, routing, experts=3, capacity=5, drop=False),
        "experts [1] have room for 5",
        "sends them [2]",
    )
    assert dispatch(x, routing, experts=3, capacity=6, drop=False).dropped == 0


@pytest.mark.ranks(3)
def test_numbers_of_experts(rank, world):
    x, routing = torch.zeros(2, WIDTH), torch.tensor([1, 1])
    raises_everywhere(SizesError, lambda: dispatch(x, routing, experts=4), "experts=4", "3 ranks")
    for wrong in ([1, 2], [1.0, 1.0, 1.0], 1.5, None):
        call = partial(dispatch, x, routing, experts=wrong)
        raises_everywhere(SizesError, call, f"experts={wrong}", "group of 3")
    sent = dispatch(x, routing, experts=3)
    raises_everywhere(PieceMismatch, lambda: combine(torch.zeros(9, 1), sent), "(9, 1)")
    assert ag.all_reduce(torch.ones(1)).item() == world


@pytest.mark.ranks(3)
def test_numbers_of_numpy(rank, world):
    x, routing = torch.zeros(2, WIDTH), torch.tensor([1, 1])
    for experts in (np.int64(3), np.array([1, 1, 1]), torch.tensor([1, 1, 1])):
        sent = dispatch(x, routing, experts=experts, capacity=np.int64(5))
        assert (sent.counts, sent.dropped) == (((5,) if rank == 1 else (0,)), int(rank == 2))


@pytest.mark.ranks(3)
def test_experts_that_the_ranks_do_not_divide(rank, world):
    x, routing = torch.zeros(2, WIDTH), torch.zeros(2, dtype=torch.int64)
    wanted, words = (SizesError, r"experts=\[2, 1, 1\]") if rank == 1 else (RankRaised, "rank 1")
    with ag.checked(), pytest.raises(wanted, match=words):
        dispatch(x, routing, experts=4 if rank == 1 else 3)
    assert sum(dispatch(x, routing, experts=[2, 1, 1]).counts) == (6, 0, 0)[rank]
