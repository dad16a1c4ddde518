"""Where torch.distributed.nn.functional is wrong: its number on three ranks, and the exact one.

Each case is a program that takes the module. Both modules run it, and both numbers are asserted. A case
that torch has since corrected stands in FIXED_IN. What hangs in the original, or takes the process
down, is in test_torch_distributed_nn.py and runs on ours alone.
"""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
import torch.distributed as dist

from allgrad.testing import run_ranks

ORIGINAL = "torch.distributed.nn.functional"
COMPAT = "allgrad.compat.torch_distributed_nn"


def weighed(y):
    """Rank r counts the result r + 1 times."""
    return ((dist.get_rank() + 1) * y).sum()


def own(*values):
    return torch.tensor([values[dist.get_rank()]], dtype=torch.float64, requires_grad=True)


def reduced(nn, name, op):
    x, code = own(1.0, 5.0, 2.0), getattr(dist.ReduceOp, op)
    if name == "all_reduce":
        y = nn.all_reduce(x, op=code)
    elif name == "reduce":
        y = nn.reduce(x, 0, op=code)
    else:
        y = nn.reduce_scatter(torch.zeros(1, dtype=torch.float64), [x, x, x], op=code)
    weighed(y).backward()
    return [round(x.grad.item(), 12)]


def off_dst(nn):
    return nn.reduce(own(1.0, 10.0, 100.0), 0).tolist()


def broadcast_in_group(nn):
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    x = own(0.0, 1.0, 2.0)
    weighed(nn.broadcast(x, 1, group)).backward()
    return x.grad.tolist()


SQUARE = torch.arange(4.0, dtype=torch.float64).view(2, 2)
TURNED = SQUARE.t().contiguous().t()  # the same numbers, column after column in memory


def gather_with_turned_gradient(nn):
    x = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    sum((y.t() * SQUARE).sum() for y in nn.all_gather(x)).backward()
    return x.grad.tolist()


def broadcast_with_turned_gradient(nn):
    x = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    y = nn.broadcast(x, 0)
    y.backward(TURNED if dist.get_rank() == 1 else SQUARE)
    return x.grad.tolist()


def gather_with_expanded_gradient(nn):
    # As from ys[r].sum(), except that the memory behind the one number is known.
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    memory = torch.tensor([1.0, 7.0], dtype=torch.float64)
    torch.autograd.backward(nn.gather(x, 0), [memory[:1].expand(2)] * 3)
    return x.grad.tolist()


def broadcast_to_turned(nn):
    return nn.broadcast(TURNED if dist.get_rank() == 1 else SQUARE, 0).tolist()


def reduce_of_turned(nn):
    y = nn.reduce(TURNED if dist.get_rank() == 1 else SQUARE, 0)
    return y.tolist() if dist.get_rank() == 0 else None


def exchange_into_turned(nn):
    x = torch.arange(3.0).repeat_interleave(3).view(3, 3) + 10 * dist.get_rank()
    return nn.all_to_all_single(torch.zeros(3, 3).t(), x).tolist()


def scatter_into_turned(nn):
    output = torch.zeros(2, 2, dtype=torch.float64).t()
    nn.reduce_scatter(output, [SQUARE] * 3)
    return output.tolist()


def rows(first, step=10.0):
    return [[first + step * r] * 3 for r in range(3)]


def raised(call):
    try:
        return call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def gather_in_group(nn):
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    call = raised(lambda: [y.item() for y in nn.gather(own(0.0, 1.0, 2.0), 1, group)])
    return call.partition(":")[0] if isinstance(call, str) else call


def base_backward(nn):
    x = own(1.0, 2.0, 3.0)

    def backward():
        weighed(nn._all_gather_base(torch.zeros(3, dtype=torch.float64), x)).backward()
        return x.grad.tolist()

    return raised(backward)


def exchange_from_turned(nn):
    x = torch.arange(9.0).view(3, 3).t()
    y = raised(lambda: nn.all_to_all_single(torch.zeros(3, 3), x))
    return y if isinstance(y, str) else y[0].tolist()


TRIPLE = [[0.0, 6.0], [3.0, 9.0]]
NOTHING = [[0.0, 0.0], [0.0, 0.0]]
WRONG = {
    "all_reduce MAX": (
        lambda nn: reduced(nn, "all_reduce", "MAX"),
        [[3.0], [3.0], [3.0]],
        [[0.0], [6.0], [0.0]],
    ),
    "all_reduce MIN": (
        lambda nn: reduced(nn, "all_reduce", "MIN"),
        [[1.0], [1.0], [1.0]],
        [[6.0], [0.0], [0.0]],
    ),
    "all_reduce PRODUCT": (
        lambda nn: reduced(nn, "all_reduce", "PRODUCT"),
        [[6.0], [6.0], [6.0]],
        [[60.0], [12.0], [30.0]],
    ),
    "reduce MAX": (
        lambda nn: reduced(nn, "reduce", "MAX"),
        [[1.0], [1.0], [1.0]],
        [[0.0], [1.0], [0.0]],
    ),
    "reduce PRODUCT": (
        lambda nn: reduced(nn, "reduce", "PRODUCT"),
        [[1.0], [1.0], [1.0]],
        [[10.0], [2.0], [5.0]],
    ),
    "reduce AVG": (
        lambda nn: reduced(nn, "reduce", "AVG"),
        [[1.0], [1.0], [1.0]],
        [[0.333333333333]] * 3,
    ),
    "reduce_scatter MAX": (
        lambda nn: reduced(nn, "reduce_scatter", "MAX"),
        [[6.0], [6.0], [6.0]],
        [[0.0], [6.0], [0.0]],
    ),
    "reduce_scatter AVG": (
        lambda nn: reduced(nn, "reduce_scatter", "AVG"),
        [[6.0], [6.0], [6.0]],
        [[2.0], [2.0], [2.0]],
    ),
    "reduce, off dst": (off_dst, [[111.0], [110.0], [100.0]], [[111.0], [0.0], [0.0]]),
    "broadcast in a group": (broadcast_in_group, [None, [0.0], [3.0]], [None, [5.0], [0.0]]),
    "gather in a group": (
        gather_in_group,
        [None, "ValueError", "ValueError"],
        [None, [1.0, 2.0], [0.0, 0.0]],
    ),
    "all_gather, gradients column after column": (
        gather_with_turned_gradient,
        [[[0.0, 3.0], [6.0, 9.0]]] * 3,
        [TRIPLE] * 3,
    ),
    "broadcast, gradients of two layouts": (
        broadcast_with_turned_gradient,
        [[[0.0, 4.0], [5.0, 9.0]], NOTHING, NOTHING],
        [[[0.0, 3.0], [6.0, 9.0]], NOTHING, NOTHING],
    ),
    "gather, expanded gradient": (
        gather_with_expanded_gradient,
        [[1.0, 7.0]] * 3,
        [[1.0, 1.0]] * 3,
    ),
    "broadcast to another layout": (
        broadcast_to_turned,
        [SQUARE.tolist(), SQUARE.t().tolist(), SQUARE.tolist()],
        [SQUARE.tolist()] * 3,
    ),
    "reduce of two layouts": (
        reduce_of_turned,
        [[[0.0, 4.0], [5.0, 9.0]], None, None],
        [[[0.0, 3.0], [6.0, 9.0]], None, None],
    ),
    "all_to_all_single into another layout": (
        exchange_into_turned,
        [[[float(r), 10.0 + r, 20.0 + r]] * 3 for r in range(3)],
        [rows(float(r)) for r in range(3)],
    ),
    "all_to_all_single from another layout": (
        exchange_from_turned,
        ["ValueError: Tensors must be contiguous"] * 3,
        [[float(r), 3.0 + r, 6.0 + r] for r in range(3)],
    ),
    "reduce_scatter into another layout": (
        scatter_into_turned,
        [NOTHING] * 3,
        [(3 * SQUARE).tolist()] * 3,
    ),
    "_all_gather_base backward on Gloo": (
        base_backward,
        ["RuntimeError: Backend not supported!"] * 3,
        [[6.0]] * 3,
    ),
}

FIXED_IN = {"broadcast in a group": (2, 14)}  # the first version of torch that is exact


def run_case(module, body):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return body(importlib.import_module(module))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WRONG)
def test_exact_where_the_original_is_wrong(name):
    body, theirs, exact = WRONG[name]
    assert run_ranks(run_case, 3, COMPAT, body) == exact
    fixed = name in FIXED_IN and torch.__version__ >= FIXED_IN[name]
    assert run_ranks(run_case, 3, ORIGINAL, body) == (exact if fixed else theirs)
