"""all_to_all."""

import pytest
import torch

import allgrad as ag
import reference
from counting import Counted
from exactness import check_exact, leaf, pieces, place, random, same, with_layouts
from places import everywhere, on
from traffic import Traffic

# send[a][b]: what rank a sends to rank b.
SEND = ((1, 2, 0, 1), (2, 0, 1, 3), (0, 0, 0, 0), (1, 1, 2, 0))


def exchange_exactly(group, dtype, how):
    _, world = place(group)
    send = [row[:world] for row in SEND[:world]]
    rank, _ = place(group)
    for dim in (0, 1, 2, -1, -3):
        shapes = []
        for row in send:
            shape = [2, 3, 2]
            shape[dim] = {"uneven": sum(row), "even": 5, "equal": 2 * world}[how]
            shapes.append(shape)
        sent = {"uneven": send[rank], "even": None, "equal": "equal"}[how]
        for layout, gradient_layouts in with_layouts("contiguous", "transposed"):
            check_exact(
                lambda x, dim=dim, sent=sent: ag.all_to_all(x, dim, send_sizes=sent, group=group),
                lambda xs, dim=dim: reference.all_to_all(
                    xs, dim, send if how == "uneven" else None
                ),
                pieces(shapes, dtype),
                group=group,
                layout=layout,
                gradient_layouts=gradient_layouts,
            )


@pytest.mark.one_in(4)
@everywhere
@pytest.mark.parametrize("how", ["uneven", "even", "equal"])
def test_all_to_all_is_exact(where, how):
    on(where, exchange_exactly, torch.float64, how)


def test_all_to_all_of_complex_is_exact():
    on("3 ranks", exchange_exactly, torch.complex128, "uneven")


@pytest.mark.ranks(3)
def test_given_receive_sizes_are_used(rank, world):
    send = [row[:world] for row in SEND[:world]]
    receive = [row[rank] for row in send]
    x = torch.zeros(sum(send[rank]))
    with Counted() as calls:
        ag.all_to_all(x, send_sizes=send[rank], recv_sizes=receive)
    assert calls == ["all_to_all"]
    with Counted() as calls:
        ag.all_to_all(x, send_sizes=send[rank])
    assert calls == ["all_gather", "all_to_all"]  # the first is about sizes
    check_exact(
        lambda x: ag.all_to_all(x, send_sizes=send[rank], recv_sizes=receive),
        lambda xs: reference.all_to_all(xs, 0, send),
        pieces([(sum(row), 2) for row in send]),
    )


@pytest.mark.ranks(1, 3)
def test_one_number_goes_to_the_first_rank(world):
    check_exact(
        ag.all_to_all,
        lambda xs: reference.all_to_all([x.reshape(1) for x in xs]),
        pieces([()] * world),
    )


@pytest.mark.ranks(1)
def test_alone_there_is_nothing_to_find_out():
    """So that a world of one can be compiled without sizes."""
    compiled = torch.compile(ag.all_to_all, backend="aot_eager", fullgraph=True)
    x = torch.arange(3.0, requires_grad=True)
    compiled(x).square().sum().backward()
    assert x.grad.tolist() == [0.0, 2.0, 4.0]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("async_op", [False, True])
def test_received_sizes_make_the_way_back_free(rank, world, async_op):
    sent = [(rank + other) % 3 for other in range(world)]
    x = leaf(random((sum(sent), 2), rank))
    got = ag.all_to_all(x, send_sizes=sent, return_sizes=True, async_op=async_op)
    y, received = got.wait() if async_op else got
    assert received == tuple((rank + other) % 3 for other in range(world))
    with Traffic() as traffic:
        back = ag.all_to_all(y, send_sizes=received, recv_sizes=sent)
    assert traffic.calls == ({"isend": world - 1, "irecv": world - 1} if world > 1 else {})
    same(back.detach(), x.detach(), "the way there and back")
    (g,) = torch.autograd.grad((back**2).sum(), x)
    same(g, 2 * x.detach(), "the gradient")


@pytest.mark.ranks(3)
def test_received_sizes_of_a_nest(rank, world):
    nest = {"a": torch.ones(3), "b": torch.ones(6, 2)}
    y, received = ag.all_to_all(nest, return_sizes=True)
    assert received == {"a": (1, 1, 1), "b": (2, 2, 2)}
    assert y["b"].shape == (6, 2)
