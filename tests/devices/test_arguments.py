"""Mistakes in calls between devices are named, with what each device had."""

from __future__ import annotations

import pytest
import torch

from allgrad import devices
from allgrad.errors import InputError, PieceMismatch, ReductionError, SizesError, TensorError

CPUS = ["cpu", "cpu", "cpu"]
X = torch.ones(4, 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: devices.broadcast(X, []), InputError, "devices is empty"),
        (lambda: devices.broadcast(X, "cpu"), InputError, "devices is a single str"),
        (lambda: devices.scatter(X, 2), InputError, "devices is a single int"),
        (lambda: devices.scatter(X, ["nowhere"]), InputError, "'nowhere' is not a device"),
        (lambda: devices.scatter(X, [-1]), InputError, "-1 is not a device"),
        (lambda: devices.scatter(X, [None]), InputError, "None is not a device"),
        (lambda: devices.scatter(X, [True]), InputError, "True is not a device"),
        (lambda: devices.gather([X], "cuda:99"), InputError, "no cuda:99 here.\nThis machine has"),
        (lambda: devices.to_device(X, "xpu:5"), InputError, "there is no xpu:5 here"),
        (lambda: devices.broadcast(3, CPUS), TensorError, "no tensor was given"),
        (lambda: devices.scatter([X], CPUS), TensorError, "x is list, not a tensor"),
        (lambda: devices.gather([X, 2], "cpu"), TensorError, r"xs\[1\] is int, not a tensor"),
        (lambda: devices.gather(X, "cpu"), InputError, "xs is a single Tensor"),
        (lambda: devices.gather([], "cpu"), InputError, "xs is empty"),
        (lambda: devices.reduce_add([], "cpu"), InputError, "groups is empty"),
        (lambda: devices.scatter(X.to_sparse(), CPUS), TensorError, "x is sparse_coo"),
        (
            lambda: devices.broadcast({"a": [X, X.to_sparse()]}, CPUS),
            TensorError,
            r"tensors\['a'\]\[1\] is sparse_coo",
        ),
        (lambda: devices.scatter(X, CPUS, dim=2), InputError, "from -2 to 1"),
        (lambda: devices.scatter(X, CPUS, dim=1.0), InputError, "dim=1.0 is out of range"),
        (lambda: devices.gather([X], "cpu", dim=-3), InputError, "dim=-3 is out of range"),
        (
            lambda: devices.reduce_add([X > 0, X > 0], "cpu"),
            ReductionError,
            "bool cannot hold a sum",
        ),
    ],
)
def test_a_mistake_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: devices.scatter(X, CPUS, sizes=(1, 2)),
            SizesError,
            "scatter: give one size for each device; they must add up to 4, not 3.\n"
            "  0: cpu, size 1\n"
            "  1: cpu, size 2\n"
            "  2: cpu, size None   <- no size\n"
            "Give 3 sizes that add up to x's length along dim 0.",
        ),
        (
            lambda: devices.scatter(X, CPUS, sizes=(1, -2, 5)),
            SizesError,
            "scatter: give one size for each device; they must add up to 4, not 6.\n"
            "  0: cpu, size 1\n"
            "  1: cpu, size -2   <- not a whole number >= 0\n"
            "  2: cpu, size 5\n"
            "Give 3 sizes that add up to x's length along dim 0.",
        ),
        (
            lambda: devices.gather([X, X, torch.ones(1, 3)], "cpu"),
            PieceMismatch,
            "gather: pieces may differ along dim 0 only.\n"
            "  0: cpu, (4, 2) float32\n"
            "  1: cpu, (4, 2) float32\n"
            "  2: cpu, (1, 3) float32   <- differs in dim 1\n"
            "Give all of them one dtype and shape before the call.",
        ),
        (
            lambda: devices.gather([X, X.double(), X, torch.ones(4)], "cpu"),
            PieceMismatch,
            "gather: pieces may differ along dim 0 only.\n"
            "  0: cpu, (4, 2) float32\n"
            "  1: cpu, (4, 2) float64   <- not float32\n"
            "  2: cpu, (4, 2) float32\n"
            "  3: cpu, (4,) float32     <- 1 dimensions, not 2\n"
            "Give all of them one dtype and shape before the call.",
        ),
        (
            lambda: devices.reduce_add([[X, X], [X, X.T]], "cpu"),
            PieceMismatch,
            "reduce_add: groups[i][1] must have one shape and one dtype in all groups.\n"
            "  0: cpu, (4, 2) float32\n"
            "  1: cpu, (2, 4) float32   <- differs in dim 0, 1\n"
            "Give all of them one dtype and shape before the call.",
        ),
    ],
)
def test_a_mismatch_shows_what_each_device_had(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_groups_of_different_structures_are_named():
    with pytest.raises(
        PieceMismatch, match=r"(?s)all groups must have the same structure.*1: .*<- differs"
    ):
        devices.reduce_add([[X, X], [X]], "cpu")
