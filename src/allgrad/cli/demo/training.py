"""The same training twice: on ranks that hold unequal batches, and in one process that holds all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
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
from allgrad.testing import parity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from allgrad.cli.demo.digits import Digits
    from allgrad.testing import ParityReport

__all__ = [
    "LOSSES",
    "TrainingConfig",
    "TrainingResult",
    "batch_sizes",
    "check_under_ddp",
    "train_in_one_process",
    "train_on_ranks",
]

_PAIRS = 128  # in one batch of all ranks together
_RATE = 5e-3
# Adam with a small eps hides a constant factor of the gradient, so that the parameters would hardly
# differ (test_demo_fails_when_gradients_are_off_by_a_factor).
_EPS = 1e-3
_TESTS = 40  # number of evaluations on the held-out pictures

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
class TrainingConfig:
    """The settings of a training run, the same on every rank and in one process."""

    loss: str
    steps: int
    ranks: int
    device: str = "cpu"

    @property
    def ranks_text(self) -> str:
        """The number of ranks, as text."""
        return "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The loss of each step, some accuracies, and the state at the end."""

    losses: list[float]
    tested: list[tuple[int, float]]
    parameters: dict[str, Tensor]  # by name, with a row for each rank
    similarities: Tensor  # of held-out pictures and the ten plain captions


class OnStep(Protocol):
    """Called after each step with its number from 1, the loss, the latest accuracy."""

    def __call__(self, step: int, loss: float, accuracy: float) -> None: ...


class Trainer(Protocol):
    """The part of the training that differs between ranks and one process."""

    def gradients(self, model: Towers, batch: Digits, sizes: list[int]) -> Tensor:
        """Set the gradient of the whole batch on the model, and return the loss."""

    def count_correct(self, model: Towers, held_out: Digits) -> Tensor:
        """Count the pictures whose nearest plain caption is their own."""

    def parameters(self, model: Towers) -> dict[str, Tensor]:
        """Return every parameter, with a row for each rank."""


class _RankTrainer:
    """One of several ranks, each with its piece of the batch."""

    def __init__(self, loss: str) -> None:
        self._loss = LOSSES[loss]

    def gradients(self, model: Towers, batch: Digits, sizes: list[int]) -> Tensor:
        loss = self._loss(*model(_piece(batch, sizes, rank_of())), sizes=sizes)
        loss.backward()
        owned = [p.grad for p in model.parameters()]
        for p, mean in zip(model.parameters(), all_reduce(owned, "mean", grad="none"), strict=True):
            p.grad = mean
        return loss

    def count_correct(self, model: Towers, held_out: Digits) -> Tensor:
        mine = held_out[rank_of() :: size_of()]
        return all_reduce(_count_correct(model, mine))

    @torch.no_grad()
    def parameters(self, model: Towers) -> dict[str, Tensor]:
        return gather({name: p[None] for name, p in model.named_parameters()})


class _SingleTrainer:
    """A single process, with the whole batch and the plain formula."""

    def __init__(self, loss: str) -> None:
        self._formula = _FORMULAS[loss]

    def gradients(self, model: Towers, batch: Digits, sizes: list[int]) -> Tensor:  # noqa: ARG002
        loss = self._formula(*model(batch))
        loss.backward()
        return loss

    def count_correct(self, model: Towers, held_out: Digits) -> Tensor:
        return _count_correct(model, held_out)

    def parameters(self, model: Towers) -> dict[str, Tensor]:
        return {name: p.detach()[None] for name, p in model.named_parameters()}


def train_on_ranks(config: TrainingConfig, on_step: OnStep) -> TrainingResult:
    """Train on every rank of the world; rank 0 gets the parameters of all ranks."""
    return _train(config, _RankTrainer(config.loss), on_step)


def train_in_one_process(config: TrainingConfig, on_step: OnStep) -> TrainingResult:
    """Train on the joined batches, without communication."""
    return _train(config, _SingleTrainer(config.loss), on_step)


def check_under_ddp(config: TrainingConfig, backend: str) -> ParityReport:
    """Compare the first steps on ranks under DDP with one process; at the fifth a rank is idle."""
    return parity(
        partial(Towers, with_bias=config.loss == "siglip"),
        _piece_of_rank,
        partial(_loss_of_pairs, config.loss),
        ranks=config.ranks,
        wrapper="ddp",
        steps=5,
        make_optimizer=_adam,
        backend=backend,
    )


def batch_sizes(step: int, ranks: int) -> list[int]:
    """The number of pairs of each rank at a step: random, and sometimes 0 on one rank."""
    generator = torch.Generator().manual_seed(step)
    cuts = torch.randint(_PAIRS + 1, (ranks - 1,), generator=generator).sort().values.tolist()
    sizes = [right - left for left, right in pairwise([0, *cuts, _PAIRS])]
    if step % 5 == 4 and ranks > 1:
        idle = step % ranks
        sizes[idle - 1] += sizes[idle]
        sizes[idle] = 0
    return sizes


def _train(config: TrainingConfig, trainer: Trainer, on_step: OnStep) -> TrainingResult:
    training, held_out = _load(config.device)
    model = Towers(with_bias=config.loss == "siglip").to(config.device)
    optimizer = _adam(model.parameters())
    between_tests = max(1, config.steps // _TESTS)
    losses: list[float] = []
    tested: list[tuple[int, float]] = []
    for step in range(config.steps):
        optimizer.zero_grad()
        loss = trainer.gradients(model, _batch(training, step), batch_sizes(step, config.ranks))
        optimizer.step()
        losses.append(loss.item())
        done = step + 1
        if done % between_tests == 0 or done == config.steps or step == 0:
            tested.append((done, int(trainer.count_correct(model, held_out)) / len(held_out)))
        on_step(done, losses[-1], tested[-1][1])
    return TrainingResult(
        losses,
        tested,
        {name: p.cpu() for name, p in trainer.parameters(model).items()},
        model.similarities(held_out.pictures, _ten_captions(held_out)).cpu(),
    )


def _batch(training: Digits, step: int) -> Digits:
    """The pairs of a step: random, and the same everywhere."""
    generator = torch.Generator().manual_seed(step)
    return training[torch.randperm(len(training), generator=generator)[:_PAIRS]]


def _piece(batch: Digits, sizes: list[int], rank: int) -> Digits:
    start, end = list(pairwise(accumulate(sizes, initial=0)))[rank]
    return batch[start:end]


def _piece_of_rank(step: int, rank: int, ranks: int) -> Digits:
    return _piece(_batch(_load("cpu")[0], step), batch_sizes(step, ranks), rank)


def _loss_of_pairs(loss: str, model: nn.Module, batch: Digits) -> Tensor:
    return LOSSES[loss](*model(batch))


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=_RATE, eps=_EPS)


_load = cache(digits.load)


def _count_correct(model: Towers, held_out: Digits) -> Tensor:
    nearest = model.similarities(held_out.pictures, _ten_captions(held_out)).argmax(1)
    return (nearest == held_out.labels).sum()


def _ten_captions(like: Digits) -> Tensor:
    return digits.tokens(digits.plain_captions()).to(like.tokens.device)
