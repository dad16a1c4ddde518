"""What is compared: a model, its batches and a step, run on a rank or in a world of one."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from allgrad._wire.world import rank_of, size_of
from allgrad._wire.wrappers import DistributedDataParallel, fully_sharded
from allgrad.containers.nests import flatten, map_tensors, unflatten
from allgrad.errors import AllgradError, InputError
from allgrad.nn.sync_batch_norm import convert
from allgrad.testing.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import TypeAlias

    Wrapper: TypeAlias = Literal["ddp", "fsdp"] | Callable[[nn.Module], nn.Module] | None
    MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    State: TypeAlias = dict[str, Tensor]

__all__ = ["Case", "Evaluation", "Model", "NoGradient", "join_pieces"]

T = TypeVar("T")

_ANOTHER = 7919  # a prime: seeds of steps and ranks do not meet


class NoGradient(AllgradError):
    """On this rank, parameters have no gradient after the step."""

    def __init__(self, rank: int, names: tuple[str, ...], all_of_them: bool) -> None:
        self.rank, self.names, self.all_of_them = rank, names, all_of_them
        which = "no parameter" if all_of_them else f"{', '.join(names)}: no parameter of these"
        super().__init__(f"rank {rank}: {which} has a gradient after the step")

    def __reduce__(self) -> tuple[type[NoGradient], tuple[int, tuple[str, ...], bool]]:
        return type(self), (self.rank, self.names, self.all_of_them)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one rank has after the backward of one step."""

    loss: float | None
    gradients: State
    syncs: int  # how often DDP synchronised gradients


@dataclass(frozen=True, slots=True)
class Model:
    """The user's model, and what the wrapper makes of it."""

    plain: nn.Module
    wrapped: nn.Module

    def parameters(self) -> State:
        """Every parameter, whole, by the name in the plain model."""
        return {name: _whole(p) for name, p in self.plain.named_parameters()}

    def buffers(self) -> State:
        """Every buffer, by its name in the plain model."""
        return {name: _whole(b) for name, b in self.plain.named_buffers()}


@dataclass(frozen=True, slots=True)
class Case:
    """The arguments of ``parity``."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int, int], Any]
    step: Callable[[Any, Any], Tensor | float | None]
    ranks: int
    wrapper: Wrapper
    steps: int
    make_optimizer: MakeOptimizer
    join: Callable[[Sequence[Any]], Any]
    dtype: torch.dtype | None
    seed: int
    backend: str
    timeout: float

    @property
    def device(self) -> str:
        """The kind of device that the backend carries."""
        return "cuda" if "nccl" in self.backend else "cpu"

    def run(self, fn: Callable[..., T], world: int, *args: Any) -> list[T]:
        """Run a function of the case on that many ranks."""
        return run_ranks(fn, world, self, *args, backend=self.backend, timeout=self.timeout)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """New tensors have the dtype of the case."""
        before = torch.get_default_dtype()
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def build(self, state: State | None = None, *, sync_norms: bool = False) -> Model:
        """The model with its initial values, or with ``state``, inside the wrapper."""
        torch.manual_seed(self.seed)
        plain = self.make_model().to(self.device)
        if self.dtype is not None:
            plain = plain.to(self.dtype)
        if state is not None:
            _load(plain, state)
        if sync_norms:
            plain = convert(plain)
        return Model(plain, self._wrap(plain))

    def _wrap(self, plain: nn.Module) -> nn.Module:
        if self.wrapper is None:
            return plain
        if self.wrapper == "ddp":
            return DistributedDataParallel(plain)
        if self.wrapper == "fsdp":
            return fully_sharded(plain, self.device)
        return self.wrapper(plain)

    def pieces(self, step: int) -> list[Any]:
        """The batch of each rank at a step; random numbers in it are the same everywhere."""
        made = []
        for rank in range(self.ranks):
            torch.manual_seed((self.seed * _ANOTHER + step) * _ANOTHER + rank)
            made.append(map_tensors(self._cast, self.make_batch(step, rank, self.ranks)))
        return made

    def own_batch(self, pieces: Sequence[Any]) -> Any:
        """The piece of this rank; in a world of one, all of them joined."""
        return pieces[rank_of()] if size_of() == self.ranks else self.join(pieces)

    def evaluate(self, model: Model, batch: Any, seed: int) -> Evaluation:
        """Run the step and its backward; gradients are those of this step alone."""
        parameters = dict(model.plain.named_parameters())
        wanted = {name: p for name, p in parameters.items() if p.requires_grad}
        torch.manual_seed((self.seed * _ANOTHER + seed) * _ANOTHER)
        with _counting_syncs(model.wrapped, wanted.values()) as count:
            loss = self.step(model.wrapped, batch)
            undone = all(p.grad is None for p in wanted.values())
            if isinstance(loss, Tensor) and loss.requires_grad and undone:
                loss.backward()
        if size_of() > 1:
            _require_gradients(model.wrapped, wanted)
        gradients = {name: _whole(p.grad) for name, p in wanted.items() if p.grad is not None}
        value = loss.detach() if isinstance(loss, Tensor) else loss
        return Evaluation(None if value is None else float(value), gradients, count())

    def _cast(self, x: Tensor) -> Tensor:
        dtype = self.dtype if x.is_floating_point() else None
        return x.to(self.device, dtype)


def join_pieces(pieces: Sequence[Any]) -> Any:
    """One batch of all pieces: tensors joined along dim 0, everything else as on rank 0."""
    flat = [flatten(piece) for piece in pieces]
    leaves, structure = flat[0]
    if any(other != structure for _, other in flat):
        raise InputError(
            "parity: the batches of the ranks differ in more than their rows.\n"
            "Give join=, a function from the list of all pieces to one batch."
        )
    columns = zip(*(found for found, _ in flat), strict=True)
    joined = [_joined(column) for column in columns] if leaves else []
    return unflatten(structure, joined)


def _joined(column: Sequence[Any]) -> Any:
    first = column[0]
    return torch.cat(list(column)) if isinstance(first, Tensor) and first.dim() else first


def _load(plain: nn.Module, state: State) -> None:
    named = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    with torch.no_grad():
        for name, value in state.items():
            named[name].copy_(value)


def _whole(x: Tensor) -> Tensor:
    """A copy on the CPU, of a DTensor the whole of it."""
    if hasattr(x, "full_tensor"):
        x = x.full_tensor()
    return x.detach().to("cpu", copy=True)


def _require_gradients(wrapped: nn.Module, wanted: dict[str, nn.Parameter]) -> None:
    """Raise where the other ranks would wait for this rank's gradients for ever."""
    missing = tuple(name for name, p in wanted.items() if p.grad is None)
    waits = isinstance(wrapped, DistributedDataParallel) and not wrapped.find_unused_parameters
    if missing and (waits or len(missing) == len(wanted)):
        raise NoGradient(rank_of(), missing, len(missing) == len(wanted))


@contextmanager
def _counting_syncs(
    wrapped: nn.Module, parameters: Iterable[nn.Parameter]
) -> Iterator[Callable[[], int]]:
    """Count the backward passes in which DDP synchronises: the most of any parameter."""
    counts: dict[int, int] = {}
    hooks = []

    def count(p: Tensor) -> None:
        if isinstance(wrapped, DistributedDataParallel) and wrapped.require_backward_grad_sync:
            counts[id(p)] = counts.get(id(p), 0) + 1

    if isinstance(wrapped, DistributedDataParallel):
        hooks = [p.register_post_accumulate_grad_hook(count) for p in parameters]
    try:
        yield lambda: max(counts.values(), default=0)
    finally:
        for hook in hooks:
            hook.remove()
