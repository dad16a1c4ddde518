"""The step of one rank alone as a CUDA graph: two launches instead of six.

Up to some thousand pairs the device waits for the host. So after some calls of one size on one
stream, their launches are captured once, over inputs and products that stay in place, and replayed:

    forward     copy_inputs    q, k, scale, bias, and where this call wants its loss
                replay         the kernels of one_rank
    backward    gradients

The products belong to the call until its backward has run or its graph is dropped. While a call holds
them, others are launched one by one. Backward runs in another thread, whose caches are cold; so all
that it needs is made in forward. Results are the same bit for bit.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from allgrad.losses._tiles import fused_kernels as kernels
from allgrad.losses._tiles.capture_stream import capture_stream
from allgrad.losses._tiles.launches import Launch
from allgrad.losses._tiles.one_rank import (
    address_of,
    aligned,
    gradients_plan,
    loss_and_products,
)

if TYPE_CHECKING:
    from torch import Tensor

    from allgrad.losses._kind import LossKind
    from allgrad.losses._tiles.one_rank import Products

__all__ = ["Lease", "replayed"]

MAX_PAIRS = 8192  # above, the host waits for the device
AFTER_CALLS = 5  # of one size; sizes that come once or twice are not worth a graph
STALE_AFTER = 30  # calls of other sizes; then a captured step may make room for another
# Products of float32 follow switches of torch for TF32, which a graph would not.
DTYPES = frozenset({torch.bfloat16, torch.float16})
_BLOCK = 4096
_MOST_COUNTED = 256


@cache
def max_bytes(device: torch.device) -> int:
    """How much all captured steps of a device may take: 1/256 of its memory."""
    return torch.cuda.get_device_properties(device).total_memory // 256


class _Key(NamedTuple):
    """What a captured step depends on."""

    kind: LossKind
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stream: int
    needed: tuple[bool, bool]
    has_bias: bool

    @property
    def bytes(self) -> int:
        """The memory of a captured step: dot products and weights, inputs and products."""
        rows, width = self.shape
        return 6 * rows * rows + 12 * rows * width


class _Captured:
    """A step over inputs and products that stay in place."""

    def __init__(self, key: _Key, q: Tensor, scale: Tensor) -> None:
        self.q, self.k = (torch.zeros(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
        self.scale = scale.clone()
        self.bias = scale.clone() if key.has_bias else None
        self.address = torch.empty((), dtype=torch.int64, device=q.device)
        self.calls = self.last_used = 0
        self.idle = [True]  # empty while a call holds the products
        inputs = q.dtype, q.dtype, torch.float32, torch.float32
        self.copy = Launch(
            kernels.copy_inputs,
            (-(-q.numel() // _BLOCK), 1, 1),
            (*inputs, *inputs, torch.int64),
            (key.has_bias, _BLOCK),
        )
        self._capture(key)
        self._prepare(key)

    def _capture(self, key: _Key) -> None:
        """Run it once on another stream, which loads what must be loaded, then capture it there."""
        unused = torch.empty_like(self.scale)
        self.address.fill_(unused.data_ptr())
        stream, side = torch.cuda.current_stream(), capture_stream(key.device, key.stream)
        side.wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                self._compute(key)
                # Other threads may go on using the device while this one captures.
                self.graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.products = self._compute(key)
                finally:
                    self.graph.capture_end()
        finally:
            # The memory of a failed capture is given back, and the other stream has stored into it.
            stream.wait_stream(side)

    def _compute(self, key: _Key) -> Products:
        return loss_and_products(
            key.kind,
            self.q,
            self.k,
            self.scale,
            self.bias,
            smoothing=0.0,
            needs_query_grad=key.needed[0],
            needs_key_grad=key.needed[1],
            address=self.address,
        )[1]

    def _prepare(self, key: _Key) -> None:
        """What calls need, found once."""
        self.stream, (left, right, parts) = key.stream, self.products
        self.targets = tuple(map(address_of, (self.q, self.k, self.scale, self.bias, self.address)))
        self.sources = *map(address_of, (left, right, parts)), self.scale.data_ptr()
        elements = [0 if x is None else x.numel() for x in (left, right)]
        sizes = len(self.q), *elements, parts.numel()
        self.gradients = gradients_plan(
            key.kind, *sizes, key.dtype, key.device, has_bias=key.has_bias
        )
        self.elements, self.needed = self.q.numel(), key.needed

    def run(self, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None) -> tuple[Tensor, Lease]:
        q, k = aligned(q), aligned(k)
        loss = torch.empty_like(scale)
        inputs = q.data_ptr(), k.data_ptr(), scale.data_ptr(), address_of(bias)
        self.copy(self.stream, *inputs, *self.targets, self.elements, loss.data_ptr())
        self.graph.replay()
        return loss, Lease(self)


class Lease:
    """The products of one call, until they are released, and memory for its gradients."""

    __slots__ = ("_addresses", "_gradients", "_held", "_step")

    def __init__(self, step: _Captured) -> None:
        step.calls += 1
        self._step, self._held = step, False
        by_query, by_key = (torch.empty_like(step.q) if needed else None for needed in step.needed)
        by_scale = torch.empty_like(step.scale)
        by_bias = None if step.bias is None else torch.empty_like(by_scale)
        self._gradients = by_query, by_key, by_scale, by_bias
        self._addresses = tuple(map(address_of, self._gradients))
        self._held = True  # with memory for all of it

    def products(self) -> Products:
        """The products of this call."""
        assert self._held
        return self._step.products

    def gradients(self, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients by queries, keys, scale and bias; can be asked for once."""
        assert self._held
        step = self._step
        launch, numbers = step.gradients
        launch(step.stream, *step.sources, by_loss.data_ptr(), *self._addresses, *numbers)
        self.release()
        return self._gradients

    def release(self) -> None:
        """Let other calls overwrite the products: what reads them has been launched."""
        if self._held:
            self._held = False
            self._step.idle.append(True)

    __del__ = release


class _Known:
    """All captured steps, and the numbers of calls of sizes that are not captured."""

    def __init__(self) -> None:
        self.steps: dict[_Key, _Captured] = {}
        self.counts: dict[_Key, int] = {}
        self.calls = 0
        self.can_capture = True

    def count(self, key: _Key, q: Tensor, scale: Tensor) -> None:
        """Count a call; capture a step for further ones if there were enough."""
        if len(self.counts) > _MOST_COUNTED:
            self.counts.clear()
        calls = self.counts[key] = self.counts.get(key, 0) + 1
        limit = max_bytes(key.device)
        if not self.can_capture or calls % AFTER_CALLS or key.bytes > limit:
            return
        for other, step in list(self.steps.items()):
            if self.calls - step.last_used > STALE_AFTER:
                self.steps.pop(other, None)  # another thread may have done so
        used = sum(other.bytes for other in list(self.steps) if other.device == key.device)
        if key.bytes + used > limit:
            return
        try:
            self.steps[key] = _Captured(key, q, scale)
        except RuntimeError:  # another thread may be capturing, or the memory be full
            self.can_capture = False
        self.counts.pop(key, None)  # another thread may have done so


_known = _Known()


def replayed(  # noqa: PLR0917
    kind: LossKind,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    needed: tuple[bool, bool],
) -> tuple[Tensor, Lease] | None:
    """The loss and a lease of its products; None if the kernels must be launched one by one."""
    shape, dtype = q.shape, q.dtype
    if shape[0] > MAX_PAIRS or dtype not in DTYPES or torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream().cuda_stream
    key = _Key(kind, shape, dtype, q.device, stream, needed, bias is not None)
    step = _known.steps.get(key)
    _known.calls += 1
    if step is None:
        _known.count(key, q, scale)
        return None
    try:
        step.idle.pop()
    except IndexError:
        return None  # a call holds the products
    step.last_used = _known.calls
    try:
        return step.run(q, k, scale, bias)
    except BaseException:  # no memory for the results, for one
        step.idle.append(True)
        raise
