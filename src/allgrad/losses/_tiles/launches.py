"""Kernels that are launched with little work on the host.

Triton finds the compiled kernel for a call by the types and the alignment of all its arguments. Here
that happens in the first call; whoever prepares a launch promises that later ones are alike. Tensors
are given as addresses, so that several arrays may lie in one tensor without a view for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

__all__ = ["Launch"]


class _Array:
    """An address as Triton sees a tensor."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


class Launch:
    """One kernel with its grid and constants, for one device.

    ``dtypes`` are those of the first arguments, which are addresses. Arguments that Triton compiles
    kernels for must be alike in all calls: dtypes, which addresses and sizes are multiples of 16.
    """

    __slots__ = ("_compiled", "_constants", "_dtypes", "_grid", "_kernel")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        dtypes: Sequence[torch.dtype],
        constants: tuple[int, ...],
    ) -> None:
        self._kernel, self._grid, self._dtypes, self._constants = kernel, grid, dtypes, constants
        self._compiled: Callable[..., object] | None = None

    def __call__(self, *args: float) -> None:
        """Launch the kernel on the current stream of the current device."""
        if self._compiled is not None:
            self._compiled(*args, *self._constants)
            return
        addresses = args[: len(self._dtypes)]
        arrays = [_Array(t, int(x)) for t, x in zip(self._dtypes, addresses, strict=True)]
        others = args[len(arrays) :]
        compiled = self._kernel[self._grid](*arrays, *others, *self._constants, num_warps=4)
        if compiled is not None:  # a hook of Triton's may take over
            self._compiled = compiled[self._grid]
