"""Mistakes that mypy --strict and pyright reject, each on a line marked "wrong" (test_typing.py)."""

from __future__ import annotations

import torch
from torch import Tensor

import allgrad as ag

x: Tensor = torch.ones(3)

ag.all_gather(x).wait()  # wrong: a tensor, not a handle
ag.all_gather(x, async_op=True).sum()  # wrong: a handle, not a tensor
ag.all_reduce(x, "average")  # wrong: no such reduction
ag.all_gather(x, 0, [1, 2])  # wrong: sizes are keyword-only
ag.all_gather(x, grad="mean")  # wrong: no such gradient
ag.reduce_scatter(x, grad="same")  # wrong: not of this collective
ag.all_gather(x, sizes="same")  # wrong: "equal", or a sequence
ag.all_gather(x, group="world")  # wrong: not a group
ag.broadcast(x, src="0")  # wrong: a rank is a number
ag.all_gather({"a": x})["a"].nothing()  # wrong: a tensor has no such method
ag.gather_sizes(x).sum()  # wrong: a tuple of ints
ag.errors.NoSuchError  # wrong: no such error
