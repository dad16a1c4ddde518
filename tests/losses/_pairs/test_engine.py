"""Every loss on real ranks against the formula in one process: values and all gradients."""

from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import normalize

import allgrad as ag
from allgrad._wire import algorithms
from allgrad.losses import (
    clip_loss,
    info_nce_loss,
    maxsim_loss,
    multiple_negatives_loss,
    siglip_loss,
    sigmoid_supcon_loss,
    supcon_loss,
)
from allgrad.losses._pairs import (
    column_sums,
    first_order,
    key_blocks,
    key_sums,
    score_pass,
    whole_pass,
)
from allgrad.losses._tiles import torch as torch_tiles
from counting import Counted
from exactness import place, random
from losses.pairs import LOSSES, NEGATIVES, PAIRS, SATURATED, batch, saturated
from places import on

TIGHT = {"rtol": 1e-12, "atol": 1e-15}


def check(group, name, kind, grad_reduction="mean", tile=None, small=False, **more):
    """``small`` batches are computed whole by every rank; without it, ranks share the work."""
    loss, formula, options = LOSSES[name]
    rank, world = place(group)
    counts = PAIRS[kind][:world]
    wanted = batch(name, counts)
    want = formula(*wanted, **options)
    want.backward()

    given = batch(name, counts, rank)
    with pytest.MonkeyPatch.context() as patch:
        if not small:
            patch.setattr(whole_pass, "SMALL_UP_TO", 0)
        if tile is not None:
            patch.setattr(torch_tiles, "CPU_TILE", tile)
            patch.setitem(torch_tiles.KEPT_SCORES, "cpu", 0)
            patch.setattr(first_order, "has_panels", lambda *_, **__: False)
        got = loss(*given, group=group, grad_reduction=grad_reduction, **options, **more)
        torch.testing.assert_close(got, want, **TIGHT)
        got.backward()
    factor = world if grad_reduction == "mean" else 1
    for number, (x, whole) in enumerate(zip(given, wanted, strict=True)):
        if x.dim():
            sizes = NEGATIVES[:world] if number == 3 else counts
            want = factor * whole.grad.split(list(sizes))[rank]
            torch.testing.assert_close(x.grad, want, **TIGHT)
        else:  # each rank has its part of the gradient; a wrapper such as DDP adds them up
            total = ag.all_reduce(x.grad, group=group) / factor
            torch.testing.assert_close(total, whole.grad, **TIGHT)


def check_all(group, kind):
    for name in LOSSES:
        check(group, name, kind)


@pytest.mark.parametrize("where", ["no world", "ranks 1 and 3 of 4", "mesh of 3"])
def test_loss_of_all_pairs_and_its_gradient(where):
    on(where, check_all, "ragged")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.ranks(1, 2, 3, 4)
def test_ragged_and_empty_batches(rank, world, kind):
    for name in LOSSES:
        check(None, name, kind)
        check(None, name, kind, grad_reduction="sum")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.ranks(2, 3, 4)
def test_small_batches_are_computed_whole_in_two_calls(rank, world, kind):
    for name, (loss, _, options) in LOSSES.items():
        check(None, name, kind, small=True)
        check(None, name, kind, small=True, grad_reduction="sum")
        if not options and "negatives" not in name:
            counts = PAIRS[kind][:world]
            with Counted() as calls:
                loss(*batch(name, counts, rank), sizes=counts).backward()
            assert calls == ["all_gather", "all_reduce"], (name, calls)


@pytest.mark.parametrize("kind", ["ragged", "empty"])
@pytest.mark.ranks(2, 3, 4)
def test_ring_is_the_same(rank, world, kind):
    for name in LOSSES:
        check(None, name, kind, ring=True)


@pytest.mark.ranks(3)
def test_ring_is_chosen_when_the_budget_is_small(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_blocks, "GatheredKeys", None)  # gathering would fail
        for name in LOSSES:
            check(None, name, "ragged", budget=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_blocks, "RingKeys", None)
        for name in LOSSES:
            check(None, name, "ragged")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tile", [(1, 1), (2, 3), (3, 2), (5, 4)])
@pytest.mark.ranks(1, 3)
def test_tiles_that_fit_nothing_evenly(rank, world, tile):
    for name in LOSSES:
        check(None, name, "ragged", tile=tile)
        check(None, name, "empty", tile=tile, ring=True)


@pytest.mark.ranks(3)
def test_sizes_may_be_of_any_kind(rank, world):
    counts = PAIRS["ragged"][:world]
    for name, (loss, _, options) in LOSSES.items():
        call = partial(loss, *batch(name, counts, rank), **options)
        want = call(sizes=counts)
        for sizes in (torch.tensor(counts), np.array(counts), [np.int64(n) for n in counts]):
            for _ in range(2):
                torch.testing.assert_close(call(sizes=sizes), want)


@pytest.mark.ranks(3)
def test_sizes_given_spare_a_message(rank, world):
    for name, (loss, _, options) in LOSSES.items():
        check(None, name, "ragged", sizes=PAIRS["ragged"][:world])
        check(None, name, "equal", sizes="equal")
        messages = []
        for sizes in (None, "equal", PAIRS["equal"][:world]):
            with Counted() as calls:
                loss(*batch(name, PAIRS["equal"][:world], rank), sizes=sizes, **options)
            messages.append(len(calls))
        spared = 0 if "negatives" in name else 1  # the numbers of negatives are still exchanged
        assert [messages[0] - n for n in messages] == [0, spared, spared], name


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.ranks(3)
def test_a_step_makes_three_collective_calls(rank, world, kept):
    """Keys; sums with the loss; gradients of keys with the weight of the loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_pass, "SMALL_UP_TO", 0)
        if not kept:
            patch.setattr(first_order, "has_panels", lambda *_, **__: False)
            patch.setitem(torch_tiles.KEPT_SCORES, "cpu", 0)
        for name, (loss, _, options) in LOSSES.items():
            extra = "negatives" in name  # their numbers
            for kind in ("equal", "ragged"):
                counts = PAIRS[kind][:world]
                with Counted() as calls:
                    loss(*batch(name, counts, rank), sizes=counts, **options).backward()
                assert len(calls) == 3 + extra, (name, kind, calls)
                with Counted() as calls:
                    loss(*batch(name, counts, rank), **options).backward()
                assert len(calls) == 4, (name, kind, calls)  # the arguments of all ranks
                with Counted() as calls:
                    loss(*batch(name, counts, rank), sizes=counts, ring=True, **options).backward()
                rounds = calls.count("all_to_all")
                shifts = (world - 1) + world if loss is siglip_loss else 2 * (world - 1) + world
                assert rounds == shifts, (name, kind, calls)
                assert len(calls) <= 2 + rounds + extra, (name, kind, calls)


@pytest.mark.ranks(2, 3)
def test_large_column_sums_take_two_messages(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_sums, "ONE_MESSAGE_UP_TO", 0)
        for kind in PAIRS:
            check(None, "clip", kind)


@pytest.mark.ranks(3)
def test_rank_without_gradient_takes_part(rank, world):
    for name, (loss, _, options) in LOSSES.items():
        want = batch(name, PAIRS["ragged"][:world], rank)
        loss(*want, **options).backward()
        given = batch(name, PAIRS["ragged"][:world], rank)
        if rank == 1:
            given = [x.detach() for x in given]
        loss(*given, **options).backward()
        if rank != 1:
            for x, y in zip(given, want, strict=True):
                torch.testing.assert_close(x.grad, y.grad, **TIGHT)


@pytest.mark.ranks(3)
def test_frozen_towers_have_no_gradient(rank, world):
    for name, (loss, _, options) in LOSSES.items():
        for frozen in range(2):
            want = batch(name, PAIRS["ragged"][:world], rank)
            loss(*want, **options).backward()
            given = batch(name, PAIRS["ragged"][:world], rank)
            given[frozen].requires_grad_(False)
            loss(*given, **options).backward()
            assert given[frozen].grad is None
            for number in {0, 1, 2} - {frozen}:
                torch.testing.assert_close(given[number].grad, want[number].grad, **TIGHT)


@pytest.mark.ranks(3)
def test_ranks_may_weigh_the_loss_differently(rank, world):
    """Each rank's gradient is that of the sum over ranks of weight times loss."""
    for name, (loss, formula, options) in LOSSES.items():
        counts = PAIRS["ragged"][:world]
        wanted = batch(name, counts)
        (6 * formula(*wanted, **options)).backward()
        given = batch(name, counts, rank)
        ((rank + 1) * loss(*given, **options)).backward()
        for number, (x, whole) in enumerate(zip(given, wanted, strict=True)):
            if x.dim():
                sizes = NEGATIVES[:world] if number == 3 else counts
                got, want = x.grad, whole.grad.split(list(sizes))[rank]
            else:
                got, want = ag.all_reduce(x.grad, grad="none"), whole.grad
            torch.testing.assert_close(got, want, **TIGHT)


@pytest.mark.ranks(2)
def test_no_graph_without_grad_mode(rank, world):
    for name, (loss, formula, options) in LOSSES.items():
        counts = PAIRS["ragged"][:world]
        with torch.no_grad():
            got = loss(*batch(name, counts, rank), **options)
        assert not got.requires_grad
        torch.testing.assert_close(got, formula(*batch(name, counts), **options).detach(), **TIGHT)


@pytest.mark.ranks(2)
def test_first_derivative_with_a_graph_is_the_same(rank, world):
    for name, (loss, _, options) in LOSSES.items():
        given = batch(name, PAIRS["ragged"][:world], rank)
        plain = torch.autograd.grad(loss(*given, **options), given)
        with_graph = torch.autograd.grad(loss(*given, **options), given, create_graph=True)
        for x, y in zip(plain, with_graph, strict=True):
            assert torch.equal(x, y)


@pytest.mark.ranks(2)
def test_backward_of_a_loss_of_frozen_towers(rank, world):
    for name, (loss, _, options) in LOSSES.items():
        given = [x.detach() for x in batch(name, PAIRS["ragged"][:world], rank)]
        loss(*given, **options).backward()
        assert all(x.grad is None for x in given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.ranks(3)
def test_sums_of_narrow_features_are_kept_in_float32(rank, world, dtype):
    for name, (loss, formula, options) in LOSSES.items():
        counts = PAIRS["ragged"][:world]
        wanted = [x.detach().double().requires_grad_() for x in batch(name, counts, dtype=dtype)]
        want = formula(*wanted, **options)
        want.backward()
        given = batch(name, counts, rank, dtype=dtype)
        got = loss(*given, **options)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
        got.backward()
        assert given[0].grad.dtype == given[2].grad.dtype == dtype
        eps = torch.finfo(dtype).eps
        near = {"rtol": 4 * eps, "atol": max(eps / 4, 2e-6)}
        for x, whole in zip(given[:2], wanted[:2], strict=True):
            mine = 3 * whole.grad.split(list(counts))[rank]
            torch.testing.assert_close(x.grad.double(), mine, **near)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.ranks(2)
def test_large_scores_keep_their_digits(rank, world, small):
    """Of features with a common part, a softmax sees the differences of the scores only."""
    counts, width = (32, 32), 64
    common = torch.nn.functional.normalize(random((1, width), 1), dim=1) * 100
    varying, noise = (random((sum(counts), width), seed) * 3 / 8 for seed in (2, 3))
    whole = [(common + x).float() for x in (varying, (varying + noise) / 2)]
    for name in ("clip", "info_nce") if small else ("info_nce",):
        loss, formula, _ = LOSSES[name]
        wanted = [x.double().requires_grad_() for x in (*whole, torch.tensor(1.0))]
        want = formula(*wanted)
        want.backward()
        assert want < 0.01 * (wanted[0] @ wanted[1].T).max()
        given = [x.split(counts)[rank].clone().requires_grad_() for x in whole]
        given.append(torch.tensor(1.0, requires_grad=True))
        with pytest.MonkeyPatch.context() as patch:
            if not small:
                patch.setattr(whole_pass, "SMALL_UP_TO", 0)
            got = loss(*given, grad_reduction="sum")
        got.backward()
        by_scale = ag.all_reduce(given[2].grad, grad="none")
        torch.testing.assert_close(by_scale.double(), wanted[2].grad, rtol=1e-4, atol=0)
        for x, y in zip(given[:2], wanted[:2], strict=True):
            part = y.grad.split(counts)[rank]
            assert (x.grad - part).norm() < 5e-5 * part.norm(), name


@pytest.mark.ranks(2)
def test_the_value_has_the_same_bits_with_any_number_of_threads(rank, world):
    """A batch that every rank computes whole, of more scores than torch adds up in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + rank)
    try:
        values = []
        for seed in range(12):
            q, k = (
                normalize(random((100, 64), 10 * seed + 2 * rank + i), dim=1).float()
                for i in range(2)
            )
            every = (clip_loss, info_nce_loss, siglip_loss)
            values += [loss(q, k, 9.0, sizes="equal").detach() for loss in every]
    finally:
        torch.set_num_threads(threads)
    of_ranks = ag.all_gather(torch.stack(values)[None])
    assert torch.equal(of_ranks, of_ranks[:1].expand(world, -1))


@pytest.mark.parametrize("counts", [(40, 40, 40), (50, 2, 61)])
@pytest.mark.parametrize("tile", [None, (16, 16)])
@pytest.mark.ranks(3)
def test_the_value_has_the_same_bits_on_every_rank(rank, world, counts, tile):
    """A program that branches on it takes the same branch everywhere."""
    values = []
    with pytest.MonkeyPatch.context() as patch, algorithms.using(reduce_scatter="pairwise"):
        patch.setattr(whole_pass, "SMALL_UP_TO", 0)
        if tile is not None:
            patch.setattr(torch_tiles, "CPU_TILE", tile)
            patch.setitem(torch_tiles.KEPT_SCORES, "cpu", 0)
            patch.setattr(first_order, "has_panels", lambda *_, **__: False)
        for seed in range(8):
            for loss, numbers in (
                (siglip_loss, (7.0, -2.0)),
                (info_nce_loss, (7.0,)),
                (clip_loss, (7.0,)),
            ):
                q, k = (random((counts[rank], 6), seed + 9 * rank + n).float() for n in (0, 100))
                values.append(loss(q.requires_grad_(), k.requires_grad_(), *numbers).detach())
    of_ranks = ag.all_gather(torch.stack(values)[None])
    assert torch.equal(of_ranks, of_ranks[:1].expand(world, -1))


@pytest.mark.ranks(2)
def test_the_value_of_very_many_ranks_takes_a_call_of_its_own(rank, world):
    for module in (key_sums, score_pass):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "MOST_PLACES", 1)
            if module is score_pass:
                patch.setattr(first_order, "has_panels", lambda *_, **__: False)
                patch.setitem(torch_tiles.KEPT_SCORES, "cpu", 0)
            for name in ("siglip", "info_nce", "info_nce, negatives"):
                check(None, name, "ragged")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.ranks(1, 3)
def test_tiny_loss_of_saturated_scores_keeps_its_digits(rank, world, dtype):
    """The gradients too, which depend on the same differences at the pairs."""
    counts = (7, 2, 4)[:world]
    lift = 2.0**30  # a loss scale, against underflow in float16
    for loss, formula, numbers in SATURATED.values():
        joined = saturated(counts, dtype)
        wanted = [x.double().requires_grad_() for x in (*joined, *map(torch.tensor, numbers))]
        want = formula(*wanted)
        assert 0 < want < 1e-5
        (lift * want).backward()
        given = [x.detach().split(list(counts))[rank].clone() for x in joined]
        given = [x.requires_grad_() for x in given]
        given += [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in numbers]
        for ring in (False, True):
            for x in given:
                x.grad = None
            got = loss(*given, grad_reduction="sum", ring=ring)
            near = 1e-10 if dtype == torch.float64 else 2e-5
            torch.testing.assert_close(got.double(), want, rtol=near, atol=0)
            (lift * got).backward()
            for number, (x, whole) in enumerate(zip(given, wanted, strict=True)):
                part = whole.grad.split(list(counts))[rank] if number < 2 else whole.grad
                mine = x.grad.double() if number < 2 else ag.all_reduce(x.grad.double())
                near = 1e-9 if dtype == torch.float64 else max(4 * torch.finfo(dtype).eps, 1e-4)
                assert (mine - part).norm() <= near * part.norm(), (formula, number)


def test_scores_far_apart_overflow_nothing():
    image = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    text = torch.tensor([[1000.0], [-900.0]], requires_grad=True)
    for loss in (clip_loss, info_nce_loss, siglip_loss):
        value = loss(image, text, 1.0)
        value.backward()
        assert value.item() == 0
        assert image.grad.isfinite().all()


def test_a_number_may_be_a_float_or_a_vector_of_one():
    image, text, scale = batch("clip", (5,))
    want = clip_loss(image, text, scale)
    for other in (7.5, scale.reshape(1), scale.to(torch.float32)):
        torch.testing.assert_close(clip_loss(image, text, other), want)
    vector = scale.detach().reshape(1).requires_grad_()
    clip_loss(image, text, vector).backward()
    assert vector.grad.shape == (1,)


@pytest.mark.ranks(1, 2)
def test_numbers_after_inference_mode_and_fake_tensors(rank, world):
    q, k = (torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with torch.inference_mode():
        before = siglip_loss(q, k, 20.0, -10.0, sizes="equal")
    with FakeTensorMode():
        fake = torch.randn(4, 8, dtype=torch.float64)
        siglip_loss(fake, fake, 20.0, -10.0, sizes="equal")
    after = siglip_loss(q, k, 20.0, -10.0, sizes="equal")
    after.backward()
    assert torch.equal(before, after.detach())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("loss", [clip_loss, info_nce_loss])
def test_label_smoothing_in_a_tensor_may_change(rank, loss):
    q, k, smoothing = random((4, 8), rank), random((4, 8), rank + 10), torch.tensor(0.0)
    for number in (0.0, 0.5):
        smoothing.fill_(number)
        given, want = (
            loss(q, k, 2.0, label_smoothing=x, sizes="equal") for x in (smoothing, number)
        )
        assert torch.equal(given, want)


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16"), ("bfloat16", "float16")])
@pytest.mark.ranks(2)
def test_autocast_to_the_other_16_bits(rank, world, dtypes):
    """Torch refuses to join tensors of a 16-bit dtype that is not autocast's."""
    own, other = (getattr(torch, dtype) for dtype in dtypes)
    x, ids = random((3, 4), rank).to(own), torch.arange(3)
    losses = (
        lambda: info_nce_loss(x, x, 2.0, x),
        lambda: multiple_negatives_loss(x, x, 2.0, hard_negatives=x),
        lambda: multiple_negatives_loss(x, x, 2.0, ids=ids),
        lambda: supcon_loss(x, x, 2.0, ids, ids),
        lambda: maxsim_loss([x, x], [x, x], 2.0),
    )
    for loss in losses:
        want = loss()
        with torch.autocast("cpu", other):
            assert torch.equal(loss(), want)


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16"), ("bfloat16", "float16")])
@pytest.mark.ranks(1, 2)
def test_backward_under_autocast_to_the_other_16_bits(rank, world, dtypes):
    own, other = (getattr(torch, dtype) for dtype in dtypes)
    given = [random((3, 4), seed + rank).to(own).requires_grad_() for seed in (1, 5)]
    ids = torch.arange(3)
    losses = (
        lambda x, y: clip_loss(x, y, 2.0),
        lambda x, y: multiple_negatives_loss(x, y, 2.0, symmetric=True),
        lambda x, y: supcon_loss(x, y, 2.0, ids, ids),
        lambda x, y: sigmoid_supcon_loss(x, y, 2.0, ids, ids),
        lambda x, y: maxsim_loss(x[None], y[None], 2.0),
    )
    for loss in losses:
        want = torch.autograd.grad(loss(*given), given)
        with torch.autocast("cpu", other):
            got = torch.autograd.grad(loss(*given), given)
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)


def test_autocast_leaves_the_products_alone():
    image, text, scale = batch("clip", (40,), dtype=torch.float32, width=64)
    want = clip_loss(image, text, scale)
    with torch.autocast("cpu", torch.bfloat16):
        got = clip_loss(image, text, scale)
    assert torch.equal(got, want)
