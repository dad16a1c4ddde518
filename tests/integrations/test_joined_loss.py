"""Any loss of the joined batch, in DDP, against one process; and the weight of a rank's mean."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allgrad.errors import InputError
from allgrad.integrations import JoinedLoss, batch_weight
from integrations.comparison import Comparison, Towers, random


def info_nce(left, right, scale, *, flipped=False):
    scores = scale * (right @ left.T if flipped else left @ right.T)
    return nn.functional.cross_entropy(scores, torch.arange(len(left)))


def mean_of_rows(left, right, scale):
    return (scale * left * right).tanh().sum(1).mean()


JOINED = Comparison(
    lambda model, x: info_nce(*model(x), flipped=True),
    lambda model, x: JoinedLoss(info_nce)(*model(x), flipped=True),
)
WEIGHTED = Comparison(
    lambda model, x: mean_of_rows(*model(x)),
    lambda model, x: mean_of_rows(*model(x)) * batch_weight(x),
)


@pytest.mark.parametrize("comparison", [JOINED, WEIGHTED], ids=["JoinedLoss", "batch_weight"])
def test_gradients_are_those_of_one_process(comparison):
    comparison.check()


class Centred(nn.Module):
    """A loss with a parameter of its own, like the proxies of metric learning."""

    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, left, right):
        return ((left - self.centre) * right).square().mean()


class WithLoss(Towers):
    def __init__(self):
        super().__init__()
        self.loss = Centred()


def of_loss(wrap):
    return lambda model, x: wrap(getattr(model, "module", model).loss)(*model(x)[:2])


def test_parameters_inside_the_loss_need_no_factor():
    Comparison(of_loss(lambda loss: loss), of_loss(JoinedLoss), make_model=WithLoss).check()


@pytest.mark.ranks(3)
def test_a_rank_may_be_empty(rank):
    x = random(4, 3, seed=5)
    piece = x.split([3, 0, 1])[rank].clone().requires_grad_()
    loss = JoinedLoss(lambda rows: rows.exp().mean())(piece)
    whole = x.clone().requires_grad_()
    expected = whole.exp().mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    # DDP divides by the number of ranks.
    torch.testing.assert_close(piece.grad / 3, whole.grad.split([3, 0, 1])[rank])
    assert batch_weight(piece) == 3 * len(piece) / 4


@pytest.mark.ranks(2)
def test_no_rows_anywhere_are_refused_on_every_rank():
    with pytest.raises(InputError, match="no rank has a row"):
        batch_weight(torch.empty(0, 3))


def test_a_world_of_one_is_the_plain_loss():
    assert not dist.is_initialized()
    x = random(3, 2)
    assert batch_weight(x) == 1
    torch.testing.assert_close(JoinedLoss(torch.mean)(x), x.mean())


def test_a_loss_that_gathers_by_itself_is_refused():
    loss = nn.Module()
    loss.gather_distributed = True
    with pytest.raises(InputError, match="gathers by itself: gather_distributed=True"):
        JoinedLoss(loss)
