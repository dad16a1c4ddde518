"""Modules that hold a process group, which cannot be copied."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["HoldsGroup"]


class HoldsGroup:
    """A module with an attribute ``group``: copies have the same one (copies of a model for its mean)."""

    group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)], memo[id(self.group)] = made, self.group
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made
