"""cross_entropy with the vocabulary split among ranks against torch's own in one process."""

import contextlib
import time
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad._wire import ended_ranks, watchdog
from allgrad.errors import AllgradError, InputError, PieceMismatch, SizesError, TensorError
from allgrad.losses import clip_loss, cross_entropy, reference
from allgrad.losses._rows import recompute, vocabulary
from allgrad.testing import run_ranks
from counting import Counted
from exactness import leaf, loss, place, random
from losses.kept_memory import largest_kept
from nn.twins import close, derivatives
from places import on
from refusals import raises_everywhere

WORDS = {"equal": (3, 3, 3, 3), "ragged": (4, 1, 2, 5)}
WIDTH = 4


def tensors(words, shape=(2, 3), dtype=torch.float64):
    """Hidden, weight and bias of all ranks, and targets of which one is ignored."""
    hidden = random((*shape, WIDTH), 1, dtype)
    weight, bias = random((words, WIDTH), 2, dtype), random((words,), 3, dtype)
    targets = torch.randint(words, shape, generator=torch.Generator().manual_seed(4))
    targets.view(-1)[1:2] = -100
    return hidden, weight, bias, targets


def check(group, kind, label_smoothing, reduction, *, with_bias, ignore_index=-100, chunk=None):
    rank, world = place(group)
    words = WORDS[kind][:world]
    hidden, weight, bias, targets = tensors(sum(words))
    targets[targets == -100] = ignore_index
    options = {
        "label_smoothing": label_smoothing,
        "reduction": reduction,
        "ignore_index": ignore_index,
    }

    whole = [leaf(x) for x in (hidden, weight, bias)]
    want = reference.cross_entropy(
        *whole[:2], targets, bias=whole[2] if with_bias else None, **options
    )
    own = [leaf(hidden), *(leaf(x.split(words)[rank]) for x in (weight, bias))]
    more = {"bias": own[2] if with_bias else None, "group": group, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHUNK_BYTES", chunk or 1 << 20)
        got = cross_entropy(*own[:2], targets, **more)
        close(got, want, "the value")

        def parts(found):
            return [found[0], *(x.split(words)[rank] for x in found[1:])]

        want = derivatives(loss(want, 0), whole, graph=True)
        got = derivatives(loss(got, 0), own, graph=True)
        for g, w in zip(got, parts(want), strict=True):
            close(g, w, "the gradient")
        for most in (recompute.KEPT_SCORES, 0):
            patch.setattr(recompute, "KEPT_SCORES", most)
            again = derivatives(loss(cross_entropy(*own[:2], targets, **more), 0), own)
            for g, w in zip(again, parts(want), strict=True):
                close(g, w, f"the gradient without a graph, up to {most} scores kept,")
        # A second loss must be the same on every rank as well: pieces are joined first.
        joined = [
            got[0],
            *(ag.all_gather(g, sizes=words, group=group, grad="same") for g in got[1:]),
        ]
        want = derivatives(sum(loss(g, 50) for g in want), whole)
        got = derivatives(sum(loss(g, 50) for g in joined), own)
        for g, w in zip(got, parts(want), strict=True):
            close(g, w, "the second derivative")


def check_all(group):
    for case in product((0.0, 0.2), ("mean", "sum", "none")):
        check(group, "ragged", *case, with_bias=case[0] > 0)
    check(group, "equal", 0.0, "mean", with_bias=False)
    check(group, "ragged", 0.1, "mean", with_bias=True, ignore_index=0)


@pytest.mark.parametrize("where", ["no world", "2 ranks", "4 ranks", "ranks 1 and 3 of 4"])
def test_equals_torch_with_two_derivatives(where):
    on(where, check_all)


@pytest.mark.ranks(3)
def test_chunks_of_rows_that_fit_nothing_evenly(rank, world):
    for chunk in (1, 2 * 4 * 8, 4 * 4 * 8):
        check(None, "ragged", 0.2, "mean", with_bias=True, chunk=chunk)


@pytest.mark.ranks(3)
def test_tokens_of_each_rank_are_joined_first(rank, world):
    """Sequence parallel: hidden and targets are pieces, gathered as values that all ranks use alike."""
    hidden, weight, _, targets = tensors(9, (6,))
    whole = [leaf(hidden), leaf(weight)]
    want = reference.cross_entropy(*whole, targets)
    want.backward()
    sizes = (3, 1, 2)
    own = [leaf(hidden.split(sizes)[rank]), leaf(weight.split(3)[rank])]
    everyone = ag.all_gather(own[0], grad="same")
    got = cross_entropy(everyone, own[1], ag.all_gather(targets.split(sizes)[rank]))
    close(got, want, "the value")
    got.backward()
    close(own[0].grad, whole[0].grad.split(sizes)[rank], "the gradient of the own tokens")
    close(own[1].grad, whole[1].grad.split(3)[rank], "the gradient of the own words")


@pytest.mark.ranks(3)
def test_messages_of_a_step(rank, world):
    hidden, weight, _, targets = tensors(9)
    own = [leaf(hidden), leaf(weight.split(3)[rank])]
    counts = []
    for sizes in (None, "equal", (3, 3, 3)):
        with Counted() as calls:
            cross_entropy(*own, targets, sizes=sizes).backward()
        counts.append(len(calls))
    assert counts == [3, 2, 2]


@pytest.mark.ranks(2)
def test_narrow_weights_keep_their_sums_in_float32(rank, world):
    hidden, weight, _, targets = tensors(8, (5,))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        own = [leaf(hidden.to(dtype)), leaf(weight.to(dtype).split(4)[rank])]
        got = cross_entropy(*own, targets)
        assert got.dtype == torch.float32
        want = reference.cross_entropy(
            hidden.to(dtype).double(), weight.to(dtype).double(), targets
        )
        torch.testing.assert_close(got.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=0)
        got.backward()
        assert own[0].grad.dtype == own[1].grad.dtype == dtype


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.ranks(2)
def test_activations_of_autocast_beside_parameters(rank, world, compiled, backward_inside):
    """As torch's own: both are multiplied in 16 bits, gradients have the parameters' dtype."""
    weight = random((6, 4), 1).float()
    own = leaf(weight.chunk(world)[rank])
    hidden, targets = leaf(random((5, 4), 2).bfloat16()), torch.arange(5)
    whole = [leaf(hidden.detach().double()), leaf(weight.bfloat16().double())]
    want = torch.nn.functional.cross_entropy(whole[0] @ whole[1].T, targets)
    want.backward()

    def run(hidden, own):
        return cross_entropy(hidden, own, targets, sizes=[3, 3])

    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = run(hidden, own)
        if backward_inside:
            value.backward()
    if not backward_inside:
        value.backward()
    torch.testing.assert_close(value.double(), want, rtol=2e-3, atol=0)
    wanted = whole[1].grad.chunk(world)[rank], whole[0].grad
    for got, expected in zip((own.grad, hidden.grad), wanted, strict=True):
        assert (got.double() - expected).norm() < 0.01 * expected.norm()
    assert own.grad.dtype == torch.float32


def test_gradients_of_chunks_are_added_in_float32():
    hidden, weight, bias, targets = tensors(8, (600,))
    given = [(x + 1 if x is hidden else x).bfloat16() for x in (hidden, weight, bias)]
    wanted = [leaf(x.double()) for x in given]
    torch.nn.functional.cross_entropy(
        wanted[0] @ wanted[1].T + wanted[2], targets.flatten()
    ).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHUNK_BYTES", 8 * 4 * 2)  # two rows
        own = [leaf(x) for x in given]
        cross_entropy(*own[:2], targets.flatten(), bias=own[2]).backward()
    for x, want in zip(own, wanted, strict=True):
        assert x.grad.dtype == torch.bfloat16
        assert (x.grad - want.grad).norm() < 5e-3 * want.grad.norm()


def test_forward_mode_runs_without_autocast():
    hidden, weight, _, targets = tensors(9)
    given = hidden.float(), weight.float()
    along = tuple(torch.ones_like(x) for x in given)
    loss = partial(cross_entropy, targets=targets)
    value, change = torch.func.jvp(loss, given, along)
    with torch.autocast("cpu", torch.bfloat16):
        cast = torch.func.jvp(loss, given, along)
    assert torch.equal(cast[0], value)
    assert torch.equal(cast[1], change)


def test_backward_of_one_rank_runs_without_autocast():
    hidden, weight, bias, targets = (x.float() if x.is_floating_point() else x for x in tensors(9))
    found = []
    for is_cast in (False, True):
        own = [leaf(x) for x in (hidden, weight, bias)]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            cross_entropy(*own[:2], targets, bias=own[2]).backward()
        found.append([x.grad for x in own])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.ranks(1, 2)
def test_targets_may_change_after_forward(rank, world):
    hidden, weight, _, targets = tensors(4)
    found = []
    for is_changed in (False, True):
        own, given = leaf(weight.chunk(world)[rank]), targets.clone()
        loss = cross_entropy(leaf(hidden), own, given)
        if is_changed:
            given.zero_()
        found.append(torch.autograd.grad(loss, own)[0])
    assert torch.equal(*found)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("ignored", [True, 2**63, 1 << 40])
def test_any_whole_number_may_be_ignored(rank, world, ignored):
    hidden, weight, _, targets = tensors(4)
    targets = targets.clamp(min=0)
    want = hidden @ weight.T
    kept = targets != ignored
    want = torch.nn.functional.cross_entropy(want[kept], targets[kept])
    got = cross_entropy(hidden, weight.chunk(world)[rank], targets, ignore_index=ignored)
    torch.testing.assert_close(got, want)


def test_no_matrix_of_logits_is_kept():
    hidden, weight = leaf(random((512, 8), 1)), leaf(random((512, 8), 2))
    targets = torch.arange(512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "CHUNK_BYTES", 32 * 512 * 8)
        patch.setattr(recompute, "KEPT_SCORES", 512 * 512 - 1)
        for order in (1, 2):
            run = partial(cross_entropy, hidden, weight, targets)
            assert largest_kept(run, (hidden, weight), order) <= 512 * 8


@pytest.mark.ranks(2)
def test_after_a_mistake_with_sizes_in_checked_mode_the_next_call_works(rank, world):
    """The ranks number their calls, and compare the numbers in backward."""
    hidden, weight = leaf(random((5, 6), 1)), leaf(random((3, 6), 2 + rank))
    for wrong in (99, 1.5):
        targets = torch.full((5,), wrong if rank == 1 else 1)
        with ag.checked():
            with pytest.raises(AllgradError):
                cross_entropy(hidden, weight, targets, sizes=[3, 3])
            good = clip_loss(hidden, hidden, 2.0)
            assert torch.isfinite(torch.autograd.grad(good, hidden)[0]).all()


@pytest.mark.ranks(3)
def test_bad_input_raises_on_every_rank(rank, world):
    hidden, weight, bias, targets = tensors(9)
    weight, bias = weight.split(3)[rank], bias.split(3)[rank]
    other, balanced = targets.clone(), targets.clone()
    other[0, 0] = (targets[0, 0] + 1) % 9
    balanced.view(-1)[:2] = torch.tensor([2, 0])
    targets.view(-1)[:2] = torch.tensor([0, 1])  # times their places, of the same sum
    wrong = {
        "piece of the vocabulary is empty": (hidden, weight[:0], targets, None, PieceMismatch),
        "different numbers of rows": (hidden, weight, targets[:1], None, PieceMismatch),
        "other widths": (hidden, weight[:, :3], targets, None, PieceMismatch),
        "dtypes": (hidden, weight.float(), targets, None, PieceMismatch),
        "different numbers of words": (hidden, weight, targets, bias[:2], PieceMismatch),
        "whole numbers": (hidden, weight, targets.double(), None, TensorError),
        "floating-point": (hidden.long(), weight, targets, None, TensorError),
        "other shape of hidden": (hidden[:1], weight, targets[:1], None, PieceMismatch),
        "other targets": (hidden, weight, other, None, PieceMismatch),
        "targets (": (hidden, weight, balanced, None, PieceMismatch),
        "other options": (hidden, weight, targets, bias, PieceMismatch),
    }
    for text, (*given, error) in wrong.items():
        h, w, t, b = given if rank == 1 else (hidden, weight, targets, None)
        call = partial(cross_entropy, h, w, t, bias=b)
        raises_everywhere(error, call, text, "rank 1: ", "<-")


@pytest.mark.ranks(2)
def test_targets_out_of_range_and_unknown_options(rank, world):
    hidden, weight, _, targets = tensors(6)
    weight = weight.split(3)[rank]
    for bad, says in ((6, "is 6"), (-1, "negative")):
        t = targets.clone()
        t[0, 0] = bad
        for sizes in (None, (3, 3)):
            call = partial(cross_entropy, hidden, weight, t, sizes=sizes)
            raises_everywhere(InputError, call, says, "6 words")
    largest = targets.clone()
    largest[0, 0] = torch.iinfo(torch.int64).max if rank else 5
    alone = ("the arguments of rank 1 are wrong", "6 words")[rank]
    for sizes, words in ((None, "same targets"), ((3, 3), alone)):
        call = partial(cross_entropy, hidden, weight, largest, sizes=sizes)
        raises_everywhere(AllgradError, call, words)
    largest.fill_(torch.iinfo(torch.int64).max)
    raises_everywhere(InputError, partial(cross_entropy, hidden, weight, largest), "6 words")
    raises_everywhere(
        InputError, lambda: cross_entropy(hidden, weight, targets, label_smoothing=2), "label_smoo"
    )
    raises_everywhere(
        InputError, lambda: cross_entropy(hidden, weight, targets, reduction="max"), "no reduction"
    )
    raises_everywhere(
        SizesError, lambda: cross_entropy(hidden, weight, targets, sizes=(4, 2)), "but it holds 3"
    )


@pytest.mark.ranks(3)
def test_with_sizes_given_a_mistake_of_one_rank_raises_on_every_rank(rank, world):
    hidden, weight, _, targets = tensors(9)
    weight, beyond = weight.split(3)[rank], targets.clone()
    beyond[0, 0] = 9
    good = hidden, weight, targets
    wrong = {
        "is 9, but": (hidden, weight, beyond),
        "but it holds 2": (hidden, weight[:2], targets),
        "the dtypes of": (hidden, weight.float(), targets),
        "hidden is not a": (None, weight, targets),
        "hidden is not": (hidden.long(), weight, targets),
        "weight is not": (hidden, hidden.tolist(), targets),
        "targets are not": (hidden, weight, None),
        "which is on meta": (hidden.to("meta"), weight, targets),
        "targets is on": (hidden.to("meta"), weight.to("meta"), targets),
    }
    for text, given in wrong.items():
        for smoothing in (0.0, 0.1):
            used = given if rank == 1 else good
            call = partial(cross_entropy, *used, sizes=(3, 3, 3), label_smoothing=smoothing)
            own = text if rank == 1 else "the arguments of rank 1 are wrong"
            raises_everywhere(InputError, call, "cross_entropy: ", own)
    options = {
        "bias is not": {"bias": [1.0, 2.0, 3.0]},
        "TypeError: '<='": {"label_smoothing": None},
        "TypeError: unhashable": {"reduction": ["mean"]},
    }
    for text, wrong in options.items():
        call = partial(cross_entropy, *good, sizes=(3, 3, 3), **(wrong if rank == 1 else {}))
        own = text if rank == 1 else "the arguments of rank 1 are wrong"
        raises_everywhere(InputError, call, "cross_entropy: ", own)


@pytest.mark.ranks(2)
def test_with_sizes_given_a_rank_with_other_rows_tells_its_own_mistake(rank):
    hidden, weight = torch.randn(4 - rank, 3), torch.randn(2, 3)
    own = PieceMismatch, "different numbers of rows"
    error, text = own if rank else (AllgradError, "different tensors")
    with pytest.raises(error, match=text):
        cross_entropy(hidden, weight, torch.arange(4), sizes="equal")


def without_hidden_and_targets():
    rank = dist.get_rank()
    hidden, weight, _, targets = tensors(9)
    weight, group = weight.split(3)[rank], dist.new_group()
    watchdog._LOOK_EVERY, ended_ranks._GRACE = 0.05, 0.3
    ag.all_reduce(torch.ones(1))
    time.sleep(1)  # the last look of the usual kind
    given = (None, weight, None) if rank == 1 else (hidden, weight, targets)
    found = []
    for mode in (ag.checked, contextlib.nullcontext):
        with mode(), pytest.raises(AllgradError) as caught:
            cross_entropy(*given, sizes=(3, 3, 3), group=group)
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    dist.barrier()  # no rank closes its connections before
    dist.destroy_process_group()
    return found


@pytest.mark.timeout(60)
def test_a_rank_that_cannot_tell_the_shape_of_its_sums_keeps_nobody_waiting():
    for rank, found in enumerate(run_ranks(without_hidden_and_targets, 3, timeout=40)):
        for text in found:
            assert "cross_entropy: hidden is not a floating-point tensor" in text
            assert text.startswith("TensorError" if rank == 1 else "RankRaised"), text
            assert rank == 1 or "rank 1" in text, text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("differs", ["bias", "sizes", "reduction", "ignore_index", "targets"])
def test_with_sizes_given_ranks_that_differ_raise_on_every_rank(rank, differs):
    """Each rank's arguments are good by themselves: only all of them together are wrong."""
    hidden, weight, targets = torch.randn(4, 3), torch.randn(2 + rank, 3), torch.arange(4)
    options = {"sizes": [2, 3]}
    call = partial(cross_entropy, hidden, weight)
    assert torch.isfinite(call(targets, **options))
    if rank:
        options |= {
            "bias": {"bias": torch.ones(3)},
            "sizes": {"sizes": [3, 3]},
            "reduction": {"reduction": "sum"},
            "ignore_index": {"ignore_index": 0},
            "targets": {},
        }[differs]
        targets = targets.flip(0) if differs == "targets" else targets
    with pytest.raises(InputError, match="rank 1 has another"):
        call(targets, **options)
    assert torch.isfinite(call(torch.arange(4), sizes=[2, 3]))


def test_targets_of_few_bits_and_an_ignore_index_beyond_them():
    hidden, weight, targets = random((4, 3), 1), random((5, 3), 2), torch.arange(4)
    for ignore_index in (2**32, -(2**40), np.int64(1)):
        want = torch.nn.functional.cross_entropy(
            hidden @ weight.T, targets, ignore_index=int(ignore_index)
        )
        got = cross_entropy(hidden, weight, targets.int(), ignore_index=ignore_index)
        torch.testing.assert_close(got, want)
    with pytest.raises(InputError, match=r"ignore_index=1\.0"):
        cross_entropy(hidden, weight, targets, ignore_index=1.0)


@pytest.mark.ranks(3)
def test_without_features_all_words_are_as_likely(rank, world):
    loss = cross_entropy(torch.ones(2, 0), torch.ones(rank + 1, 0), torch.tensor([0, 5]))
    torch.testing.assert_close(loss, torch.tensor(6.0).log())


@pytest.mark.ranks(3)
def test_words_that_a_bias_rules_out(rank, world):
    """As those that fill up a vocabulary: all words of the last rank, and one of the first."""
    hidden, weight, bias, targets = tensors(9)
    bias = bias.index_fill(0, torch.tensor([1, 6, 7, 8]), -torch.inf)
    targets = torch.where(targets == 1, 0, targets.clamp(max=5))
    whole = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    want = reference.cross_entropy(*whole[:2], targets, bias=whole[2])
    want.backward()
    own = [hidden, weight.split(3)[rank], bias.split(3)[rank]]
    own = [x.clone().requires_grad_() for x in own]
    got = cross_entropy(*own[:2], targets, bias=own[2])
    got.backward()
    close(got, want, "loss")
    close(own[0].grad, whole[0].grad, "hidden")
    for x, y in zip(own[1:], whole[1:], strict=True):
        close(x.grad, y.grad.split(3)[rank], "its words")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.ranks(3)
def test_checked_mode_compares_hidden_but_for_rounding(rank, world, dtype):
    hidden = random((2, 7, 5), 3).to(dtype)
    weight, targets = random((2, 5), 10 + rank).to(dtype), torch.arange(14).view(2, 7) % 6
    want = cross_entropy(hidden, weight, targets)
    other = {
        "dropout": hidden * (random(hidden.shape, 20 + rank) > 0).to(dtype),
        "one row": torch.cat([hidden[:1], (-1) ** rank * hidden[1:]]),
        "no number": hidden * (torch.nan if rank == 1 else 1),
    }
    with ag.checked():
        eps = torch.finfo(dtype).eps
        rounded = hidden * (1 + rank * eps)
        got = cross_entropy(rounded, weight, targets)
        torch.testing.assert_close(got, want, rtol=2 * eps, atol=0)
        assert cross_entropy(hidden * torch.nan, weight, targets).isnan()
        infinite = hidden.clone()
        infinite[0, 0, 0] = torch.inf
        assert not cross_entropy(infinite, weight, targets).isfinite()
        for x in other.values():
            call = partial(cross_entropy, x, weight, targets)
            raises_everywhere(InputError, call, "hidden must be the same on every rank", "<-")
    assert cross_entropy(other["dropout"], weight, targets).isfinite()
