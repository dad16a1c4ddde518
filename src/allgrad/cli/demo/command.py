"""The demo: train on real ranks and in one process, and compare the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad.cli.demo import picture
from allgrad.cli.demo.progress import say
from allgrad.cli.demo.training import batch_sizes, check_under_ddp
from allgrad.cli.demo.worlds import (
    torchrun_world,
    train_alone,
    train_in_torchrun_world,
    train_on_new_ranks,
)

if TYPE_CHECKING:
    from pathlib import Path

    from allgrad.cli.demo.training import TrainingConfig, TrainingResult

__all__ = ["run"]

_LIMIT = 1e-8  # rounding in float64 is far below, a wrong gradient far above


def run(config: TrainingConfig, *, backend: str, out: Path) -> bool:
    """Train twice, print, plot, and tell whether both gave the same parameters."""
    world = torchrun_world()
    prints = world is None or world[0] == 0
    if prints:
        _introduce(config, backend)
    ranks = (train_on_new_ranks if world is None else train_in_torchrun_world)(config, backend)
    if not prints:
        return True
    one = train_alone(config)
    difference, name = _largest_difference(ranks, one)
    picture.draw(out, config, ranks, one, difference)
    same = difference <= _LIMIT
    say(f"Largest difference of any parameter on any rank: {difference:.1e} ({name})")
    if not same:
        say(f"That is more than {_LIMIT:.0e}: the gradients are not the same.")
    elif world is None and config.ranks > 1:
        report = check_under_ddp(config, backend)
        say(str(report))
        same = report.equal
    say(f"Both loss curves and the similarity matrix: {out}")
    return same


def _introduce(config: TrainingConfig, backend: str) -> None:
    say(
        f"{config.ranks_text} ({backend}) and then one process match handwritten digits and captions."
    )
    sizes = "  ".join("+".join(map(str, batch_sizes(step, config.ranks))) for step in range(5))
    say(f"Pairs on each rank at the first steps: {sizes}")
    say("Correct: the held-out pictures whose nearest of ten captions is their own.")


def _largest_difference(ranks: TrainingResult, one: TrainingResult) -> tuple[float, str]:
    """The largest difference between any rank and one process, and its parameter; NaN is largest."""
    found = {
        name: float((ranks.parameters[name] - expected).abs().max())
        for name, expected in one.parameters.items()
    }
    name = max(found, key=lambda n: (found[n] != found[n], found[n]))
    return found[name], name
