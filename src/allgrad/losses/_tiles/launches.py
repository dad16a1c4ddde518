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

__all__ = ["Launch", "launch"]

# Of kernels over one tile. A product and a sum are one instruction, as was Triton's default up to 3.9.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


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

    __slots__ = ("_constants", "_dtypes", "_grid", "_kernel", "_launcher", "_runner")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        dtypes: Sequence[torch.dtype],
        constants: tuple[int, ...],
    ) -> None:
        self._kernel, self._grid, self._dtypes, self._constants = kernel, grid, dtypes, constants
        self._runner: Callable[..., object] | None = None
        self._launcher: tuple[Any, Any, Any] | None = None

    def __call__(self, stream: int, *args: float) -> None:
        """Launch the kernel on a stream, which must be the current one of the current device."""
        if self._launcher is not None:
            run, function, metadata = self._launcher
            nothing = None, None, None  # what hooks are told, the hook before, the hook after
            run(*self._grid, stream, function, metadata, *nothing, *args, *self._constants)
        elif self._runner is not None:
            self._runner(*args, *self._constants)
        else:
            self._first(*args)

    def _first(self, *args: float) -> None:
        addresses = args[: len(self._dtypes)]
        arrays = [_Array(t, int(x)) for t, x in zip(self._dtypes, addresses, strict=True)]
        others = args[len(arrays) :]
        compiled = self._kernel[self._grid](*arrays, *others, *self._constants, **OPTIONS)
        if compiled is None:  # a hook of Triton's may take over
            return
        self._runner = compiled[self._grid]
        # What the runner calls, in Triton 3.3 to 3.9; without them, the runner.
        names = "run", "function", "packed_metadata"
        if all(hasattr(compiled, name) for name in names):
            self._launcher = compiled.run, compiled.function, compiled.packed_metadata


_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: tuple[int, ...],
    *signature: object,
    num_warps: int = OPTIONS["num_warps"],
) -> None:
    """Launch a kernel on tensors. What Triton does in each call is done once for each kind of call.

    ``constants`` and ``signature`` are what Triton would find the compiled kernel by: the last
    arguments, dtypes, the alignment of rows, the device.
    """
    key = kernel, constants, num_warps, signature
    found = _compiled.get(key)
    if found is None:
        options = OPTIONS | {"num_warps": num_warps}
        _compiled[key] = kernel[grid](*args, *constants, **options)
    else:
        found[grid](*args, *constants)
