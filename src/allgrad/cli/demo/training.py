"""The same training twice: by ranks that hold unequal batches, and by one process that holds all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import torch

from allgrad import losses
from allgrad._wire.world import rank_of, size_of
from allgrad.cli.demo import digits
from allgrad.cli.demo.towers import Towers
from allgrad.collectives.all_reduce import all_reduce
from allgrad.collectives.gather import gather
from allgrad.losses import reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from allgrad.cli.demo.digits import Digits

__all__ = ["LOSSES", "Course", "Run", "batch_sizes", "by_one_process", "by_ranks"]

_PAIRS = 128  # in a batch of all ranks together
_RATE = 5e-3
# A small eps would divide a wrong factor of the gradient away, and the parameters would hardly show
# it (test_demo_fails_when_gradients_are_off_by_a_factor).
_EPS = 1e-3
_TESTS = 40  # how often the held-out pictures are looked at

LOSSES: dict[str, Callable[..., Tensor]] = {
    "clip": losses.clip_loss,
    "siglip": losses.siglip_loss,
    "info_nce": losses.info_nce_loss,
}
_FORMULAS: dict[str, Callable[..., Tensor]] = {
    "clip": reference.clip,
    "siglip": reference.siglip,
    "info_nce": reference.info_nce,
}


@dataclass(frozen=True, slots=True)
class Course:
    """What is trained, the same on every rank and in one process."""

    loss: str
    steps: int
    ranks: int
    device: str = "cpu"

    @property
    def who(self) -> str:
        """Tell how many ranks there are, in words."""
        return "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a training: the loss of each step, some accuracies, and the end."""

    losses: list[float]
    tested: list[tuple[int, float]]
    parameters: dict[str, Tensor]  # by name, with a row for each rank
    similarities: Tensor  # of held-out pictures and the ten plain captions


class Watch(Protocol):
    """Who is told of each step: its number from 1, the loss, the newest accuracy."""

    def __call__(self, step: int, loss: float, accuracy: float) -> None: ...


class Hands(Protocol):
    """Who does the work."""

    def gradients(self, model: Towers, batch: Digits, sizes: list[int]) -> Tensor:
        """Put the gradient of the whole batch into the model, and give its loss."""

    def right(self, model: Towers, held_out: Digits) -> Tensor:
        """Count the pictures whose nearest plain caption is the right one."""

    def parameters(self, model: Towers) -> dict[str, Tensor]:
        """Give every parameter, with a row for each rank."""


class _Ranks:
    """One of several processes, each with its piece of the batch."""

    def __init__(self, loss: str) -> None:
        self._loss = LOSSES[loss]

    def gradients(self, model: Towers, batch: Digits, sizes: list[int]) -> Tensor:
        loss = self._loss(*model(_own_piece(batch, sizes)), sizes=sizes)
        loss.backward()
        owned = [p.grad for p in model.parameters()]
        for p, mean in zip(model.parameters(), all_reduce(owned, "mean", grad="none"), strict=True):
            p.grad = mean
        return loss

    def right(self, model: Towers, held_out: Digits) -> Tensor:
        mine = held_out[rank_of() :: size_of()]
        return all_reduce(_count_right(model, mine))

    @torch.no_grad()
    def parameters(self, model: Towers) -> dict[str, Tensor]:
        return gather({name: p[None] for name, p in model.named_parameters()})


class _One:
    """One process alone, with the whole batch and the plain formula."""

    def __init__(self, loss: str) -> None:
        self._formula = _FORMULAS[loss]

    def gradients(self, model: Towers, batch: Digits, sizes: list[int]) -> Tensor:  # noqa: ARG002
        loss = self._formula(*model(batch))
        loss.backward()
        return loss

    def right(self, model: Towers, held_out: Digits) -> Tensor:
        return _count_right(model, held_out)

    def parameters(self, model: Towers) -> dict[str, Tensor]:
        return {name: p.detach()[None] for name, p in model.named_parameters()}


def by_ranks(course: Course, watch: Watch) -> Run:
    """Train on every rank of the world; rank 0 ends with the parameters of all."""
    return _train(course, _Ranks(course.loss), watch)


def by_one_process(course: Course, watch: Watch) -> Run:
    """Train on the joined batches, without communication."""
    return _train(course, _One(course.loss), watch)


def batch_sizes(step: int, ranks: int) -> list[int]:
    """How many pairs each rank gets at a step: cut anywhere, and at times nothing for one rank."""
    chance = torch.Generator().manual_seed(step)
    cuts = torch.randint(_PAIRS + 1, (ranks - 1,), generator=chance).sort().values.tolist()
    sizes = [right - left for left, right in pairwise([0, *cuts, _PAIRS])]
    if step % 5 == 4 and ranks > 1:
        idle = step % ranks
        sizes[idle - 1] += sizes[idle]
        sizes[idle] = 0
    return sizes


def _train(course: Course, hands: Hands, watch: Watch) -> Run:
    training, held_out = digits.load(course.device)
    model = Towers(biased=course.loss == "siglip").to(course.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE, eps=_EPS)
    between_tests = max(1, course.steps // _TESTS)
    losses: list[float] = []
    tested: list[tuple[int, float]] = []
    for step in range(course.steps):
        optimizer.zero_grad()
        loss = hands.gradients(model, _batch(training, step), batch_sizes(step, course.ranks))
        optimizer.step()
        losses.append(loss.item())
        done = step + 1
        if done % between_tests == 0 or done == course.steps or step == 0:
            tested.append((done, int(hands.right(model, held_out)) / len(held_out)))
        watch(done, losses[-1], tested[-1][1])
    return Run(
        losses,
        tested,
        {name: p.cpu() for name, p in hands.parameters(model).items()},
        model.similarities(held_out.pictures, _ten_captions(held_out)).cpu(),
    )


def _batch(training: Digits, step: int) -> Digits:
    """The pairs of a step, by chance and the same everywhere."""
    chance = torch.Generator().manual_seed(step)
    return training[torch.randperm(len(training), generator=chance)[:_PAIRS]]


def _own_piece(batch: Digits, sizes: list[int]) -> Digits:
    start, end = list(pairwise(accumulate(sizes, initial=0)))[rank_of()]
    return batch[start:end]


def _count_right(model: Towers, held_out: Digits) -> Tensor:
    nearest = model.similarities(held_out.pictures, _ten_captions(held_out)).argmax(1)
    return (nearest == held_out.labels).sum()


def _ten_captions(like: Digits) -> Tensor:
    return digits.tokens(digits.plain_captions()).to(like.tokens.device)
