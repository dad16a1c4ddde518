"""make_fx and torch.func.linearize on real tensors: the graph has the messages, or there is none."""

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import allgrad as ag
from allgrad import losses
from allgrad.errors import ModeError

CALLS = {
    "all_reduce": ag.all_reduce,
    "all_reduce, max": lambda x: ag.all_reduce(x, "max"),
    "all_reduce, none": lambda x: ag.all_reduce(x, grad="none"),
    "all_gather": ag.all_gather,
    "all_gather, equal": lambda x: ag.all_gather(x, sizes="equal"),
    "all_gather, async": lambda x: ag.all_gather(x, sizes="equal", async_op=True).wait(),
    "reduce_scatter": ag.reduce_scatter,
    "all_to_all": ag.all_to_all,
    "broadcast": lambda x: ag.broadcast(x, 1),
    "reduce": lambda x: ag.reduce(x, 1),
    "gather": lambda x: ag.gather(x, 1),
    "scatter": lambda x: ag.scatter(x, 1),
    "shift": ag.shift,
    "scan": ag.scan,
    "share": ag.share,
    "split": ag.split,
}


def pieces():
    rank = dist.get_rank()
    return [torch.arange(4.0, dtype=torch.float64).sin() + shift + rank for shift in (0, 1, 2)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_graph_of_real_tensors_sends_what_the_call_sends(name):
    def squares(x):
        return CALLS[name](x * x).sin()

    traced_with, x, _ = pieces()
    graph = make_fx(squares)(traced_with)
    torch.testing.assert_close(graph(x), squares(x), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("name", CALLS)
def test_linearize_equals_jvp(name):
    def squares(x):
        return CALLS[name](x * x).sin()

    x, *directions = pieces()
    y, linear = torch.func.linearize(squares, x)
    for v in directions:
        want_y, want = torch.func.jvp(squares, (x,), (v,))
        torch.testing.assert_close(y, want_y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(linear(v), want, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_graph_of_a_gradient_goes_backward_over_ranks():
    def gradient(x):
        return torch.func.grad(lambda x: (ag.all_gather(x.sin()) ** 2).sum())(x)

    traced_with, x, _ = pieces()
    graph = make_fx(gradient)(traced_with)
    torch.testing.assert_close(graph(x), gradient(x), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("record", [make_fx, lambda fn: lambda x: torch.func.linearize(fn, x)])
@pytest.mark.parametrize("loss", [losses.clip_loss, losses.multiple_negatives_loss])
def test_losses_refuse(loss, record):
    with pytest.raises(ModeError, match="none of its messages"):
        record(lambda x: loss(x, x, torch.ones(())))(torch.randn(3, 4))
