"""lightly: losses of the joined batch, and the gather."""

import pytest
import torch

from allgrad.errors import InputError
from integrations.comparison import Comparison, needs, random

pytestmark = needs("lightly", "lightly")


def losses(name, **options):
    import lightly.loss

    return getattr(lightly.loss, name)(**options)


def compare(name):
    def alone(model, x):
        return losses(name)(*model(x)[:2])

    def theirs(model, x):
        return losses(name, gather_distributed=True)(*model(x)[:2])

    def ours(model, x):
        from allgrad.integrations.lightly import JoinedLoss

        return JoinedLoss(losses(name))(*model(x)[:2])

    return Comparison(alone, ours, theirs)


NAMES = ["NTXentLoss", "DCLLoss", "VICRegLoss", "BarlowTwinsLoss"]
COMPARISONS = {name: compare(name) for name in NAMES}


@pytest.mark.parametrize("name", COMPARISONS)
def test_gradients_are_those_of_one_process(name):
    COMPARISONS[name].check()


@pytest.mark.ranks(2)
def test_gather_gives_pieces_of_any_size(rank):
    from allgrad.integrations.lightly import gather

    x = random(2 + rank, 3, seed=rank).requires_grad_()
    pieces = gather(x)
    assert [len(piece) for piece in pieces] == [2, 3]
    torch.testing.assert_close(pieces[rank], x)
    ((rank + 1) * pieces[0].sum()).backward()
    expected = 3.0 if rank == 0 else 0.0  # rank 0 counts its piece once, rank 1 twice
    assert x.grad.eq(expected).all()


def test_a_loss_that_gathers_by_itself_is_refused():
    from allgrad.integrations.lightly import JoinedLoss

    with pytest.raises(InputError, match="NTXentLoss gathers by itself"):
        JoinedLoss(losses("NTXentLoss", gather_distributed=True))
