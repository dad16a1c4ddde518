"""Write docs/collectives.md from the docstrings: ``python docs/render.py``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import allgrad as ag

PAGE = Path(__file__).parent / "collectives.md"

ORDER = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"),
    *("gather", "scatter", "permute", "shift", "scan", "share", "split", "sizes"),
)

INTRODUCTION = """# The collectives

Written from the docstrings by `python docs/render.py`. Everywhere:

- `x` is a tensor, or any nest of dicts, lists, tuples, named tuples and dataclasses of tensors: the leaves
  of one dtype travel in one message, and each keeps its own gradient.
- `sizes=None` finds the sizes out with one small message; a sequence of ints is trusted and costs none;
  `"equal"` promises that all pieces have one size.
- `group` is `None`, a `ProcessGroup`, a 1-D `DeviceMesh`, or `(mesh, "axis")`; ranks count within it.
- `async_op=True` starts the call and gives a handle; `handle.wait()` gives the result. In backward the roles
  swap: wait starts the adjoint, the start point waits for it, so the overlap is mirrored. `min`, `max`, `prod`
  and `logsumexp` are done by the time the handle is there.
- Inputs are never changed; results are new, contiguous tensors.
"""


def render() -> str:
    """The page as it should be."""
    parts = [INTRODUCTION]
    for name in ORDER:
        function = getattr(ag, name)
        signature = str(inspect.signature(function)).partition(" -> ")[0]
        signature = re.sub(r": '(?:reductions\.)?([^']*)'", r": \1", signature)
        text = inspect.getdoc(function) or ""
        parts.append(f"## {name}\n\n```text\n{name}{signature}\n```\n\n{_paragraphs(text)}\n")
    return "\n".join(parts)


def _paragraphs(text: str) -> str:
    """Markdown of a docstring: pictures become blocks, code is quoted once."""
    out = []
    for block in text.split("\n\n"):
        if all(line.startswith("    ") for line in block.splitlines()):
            picture = "\n".join(line[4:] for line in block.splitlines())
            out.append(f"```text\n{picture}\n```")
        else:
            out.append(block.replace("``", "`"))
    return "\n\n".join(out)


if __name__ == "__main__":
    PAGE.write_text(render())
