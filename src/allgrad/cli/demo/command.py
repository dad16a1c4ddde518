"""The demo: real ranks learn to match pictures and captions, and one process learns the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allgrad.cli.demo import picture
from allgrad.cli.demo.progress import say
from allgrad.cli.demo.training import batch_sizes
from allgrad.cli.demo.worlds import alone, in_torchruns_world, on_new_ranks, torchruns_world

if TYPE_CHECKING:
    from pathlib import Path

    from allgrad.cli.demo.training import Course, Run

__all__ = ["show"]

_LIMIT = 1e-8  # rounding in float64 stays far below, a wrong gradient far above


def show(course: Course, *, backend: str, out: Path) -> bool:
    """Train twice, print, draw, and tell whether both came to the same parameters."""
    place = torchruns_world()
    speaking = place is None or place[0] == 0
    if speaking:
        _introduce(course, backend)
    ranks = (on_new_ranks if place is None else in_torchruns_world)(course, backend)
    if not speaking:
        return True
    one = alone(course)
    difference, name = _largest_difference(ranks, one)
    picture.draw(out, course, ranks, one, difference)
    same = difference <= _LIMIT
    say(f"Largest difference of any parameter on any rank: {difference:.1e} ({name})")
    if not same:
        say(f"That is more than {_LIMIT:.0e}: the gradients are not the same.")
    say(f"Both loss curves and the similarity matrix: {out}")
    return same


def _introduce(course: Course, backend: str) -> None:
    say(f"{course.who} ({backend}) and then one process match handwritten digits and captions.")
    sizes = "  ".join("+".join(map(str, batch_sizes(step, course.ranks))) for step in range(5))
    say(f"Pairs on each rank at the first steps: {sizes}")
    say("Right are held-out pictures that are nearest to their own of ten captions.")


def _largest_difference(ranks: Run, one: Run) -> tuple[float, str]:
    """Between any rank and one process, and in which parameter; not a number counts as most."""
    found = {
        name: float((ranks.parameters[name] - wanted).abs().max())
        for name, wanted in one.parameters.items()
    }
    name = max(found, key=lambda n: (found[n] != found[n], found[n]))
    return found[name], name
