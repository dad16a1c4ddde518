"""The collectives beside raw torch.distributed, its differentiable versions, and padding.

    python benchmarks/collectives.py [--ranks 2,4] [--sizes 4KiB,64MiB] [--json FILE] [--png FILE]

The same as ``allgrad bench``; ``allgrad.cli.bench`` describes what is measured, and how.
"""

from __future__ import annotations

import typer

from allgrad.cli.bench.command import bench

if __name__ == "__main__":
    typer.run(bench)
