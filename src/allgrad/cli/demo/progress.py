"""Progress of a training run: a live bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from allgrad.cli.demo.training import OnStep

__all__ = ["progress_of", "say"]

_PLAIN_LINES = 5


def say(line: str = "") -> None:
    """Print one line, without wrapping, markup or emoji."""
    Console().print(Text(line), soft_wrap=True)


@contextmanager
def progress_of(title: str, steps: int) -> Iterator[OnStep]:
    """Show the progress of a training run with ``steps`` steps."""
    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        yield _lines(title, steps)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  correct {task.fields[accuracy]:6.1%}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=steps, loss=float("nan"), accuracy=0.0)

        def on_step(step: int, loss: float, accuracy: float) -> None:
            bar.update(task, completed=step, loss=loss, accuracy=accuracy)

        yield on_step


def _lines(title: str, steps: int) -> OnStep:
    shown = {1, *(steps * part // _PLAIN_LINES for part in range(1, _PLAIN_LINES + 1))}

    def on_step(step: int, loss: float, accuracy: float) -> None:
        if step in shown:
            say(
                f"{title}  step {step:>{len(str(steps))}}  loss {loss:.4f}  correct {accuracy:6.1%}"
            )

    return on_step
