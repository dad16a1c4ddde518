"""Losses of meta tensors: shapes alone, with sizes given as for the collectives."""

from functools import partial

import pytest
import torch

import allgrad as ag
from allgrad.errors import ModeError
from allgrad.losses import (
    KeyQueue,
    clip_loss,
    cross_entropy,
    info_nce_loss,
    maxsim_loss,
    multiple_negatives_loss,
    siglip_loss,
    sigmoid_supcon_loss,
    supcon_loss,
)
from refusals import raises_everywhere


def empty(*shape):
    return torch.empty(shape, device="meta", requires_grad=True)


def calls(x, k, targets):
    return {
        "clip": partial(clip_loss, x, k, 3.0),
        "siglip": partial(siglip_loss, x, k, empty(), empty()),
        "info_nce": partial(info_nce_loss, x, k, 3.0, label_smoothing=0.1),
        "ring": partial(clip_loss, x, k, 3.0, ring=True),
        "cross_entropy": partial(cross_entropy, x, k, targets, label_smoothing=0.1),
    }


@pytest.mark.ranks(1, 3)
def test_sizes_are_enough_for_shapes(rank, world):
    sizes = (3, 1, 4)[:world]
    for name in calls(*(None,) * 3):
        rows = 5 if name == "cross_entropy" else sizes[rank]  # hidden is the same on every rank
        x, k = empty(rows, 8), empty(sizes[rank], 8)
        targets = torch.empty(rows, device="meta", dtype=torch.int64)
        loss = calls(x, k, targets)[name](sizes=sizes)
        assert loss.is_meta
        assert loss.shape == ()
        loss.backward()
        for leaf in (x, k):
            assert leaf.grad.is_meta
            assert leaf.grad.shape == leaf.shape


@pytest.mark.ranks(1, 3)
def test_numbers_of_rows_are_found_out_in_each_call(rank, world):
    """Four calls: a third one like two before would be expected, and its row could not be read."""
    x, ids = empty(rank + 1, 8), torch.empty(rank + 1, device="meta", dtype=torch.int64)
    for margin in (None, None, None, None, 0.1):
        for loss in (
            supcon_loss(x, x, 3.0, ids, ids, margin=margin),
            sigmoid_supcon_loss(x, x, 3.0, ids, ids, margin=margin),
            multiple_negatives_loss(x, x, 3.0, ids=ids, margin=margin),
        ):
            assert loss.is_meta
            (by_x,) = torch.autograd.grad(loss, x)
            assert by_x.is_meta
            assert by_x.shape == x.shape


@pytest.mark.ranks(3)
def test_a_number_on_meta_is_refused_in_checked_mode_too(rank, world):
    x, ids = torch.ones(2, 4), torch.arange(2)
    scale = torch.tensor(3.0, device="meta" if rank == 1 else "cpu")
    with ag.checked():
        call = partial(supcon_loss, x, x, scale, ids, ids)
        raises_everywhere(ModeError, call, "a meta tensor has a shape only", "rank 1: ", "<-")


@pytest.mark.ranks(3)
def test_what_must_be_read_is_refused(rank, world):
    x, targets = empty(3, 8), torch.empty(3, device="meta", dtype=torch.int64)
    refused = [*calls(x, x, targets).values()]
    refused.append(partial(maxsim_loss, x.unsqueeze(1), x.unsqueeze(1)))
    refused.append(partial(KeyQueue(4, 8).push, x.detach()))
    for call in refused:
        raises_everywhere(ModeError, call, "a meta tensor has a shape only", "sizes=")
