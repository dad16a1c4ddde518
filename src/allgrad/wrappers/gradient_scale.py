"""The factor between the sum of all ranks' gradients and what a wrapper leaves in ``.grad``."""

from __future__ import annotations

from typing import NamedTuple, TypeVar
from weakref import WeakSet

from torch import nn

from allgrad._core.module_internals import fsdp1_ranks
from allgrad._wire import wrappers
from allgrad.errors import InputError

__all__ = ["GradientScale", "gradient_scale", "sum_gradients"]

M = TypeVar("M", bound=nn.Module)

_summing: WeakSet[nn.Module] = WeakSet()


class GradientScale(NamedTuple):
    """What a wrapper does: ``.grad`` is ``factor`` times the sum of all ranks' gradients."""

    wrapper: str
    factor: float
    why: str

    def __str__(self) -> str:
        what = "this rank's own part" if self.wrapper == "no wrapper" else "the sum over ranks"
        return f"{self.wrapper}: .grad is {self.factor:g} times {what}; {self.why}"


def gradient_scale(model: nn.Module, *, accumulation: int = 1) -> GradientScale:
    """Tell what the wrapper of ``model`` does with the gradients of the ranks.

        rank 0   A                      DDP, FSDP, DeepSpeed     (A + B + C) / 3
        rank 1   B    backward  --->    after sum_gradients       A + B + C
        rank 2   C                      no wrapper                its own part

    ``model`` is a DDP module, an FSDP2 or FSDP1 module, or a DeepSpeed engine, compiled or not, or holds
    such modules that have all of its parameters. To train on the sum
    of all ranks' losses, divide the loss by ``factor``. ``accumulation`` is by how much a trainer
    divides the loss: ``accelerator.gradient_accumulation_steps`` of Accelerate; DeepSpeed's own is
    read from the engine.

    Known are the wrappers themselves and ``sum_gradients``. A communication hook or a divide factor
    of your own is not seen here; ``allgrad.testing.parity`` measures it.

    Cost: nothing is sent.
    """
    if not accumulation > 0:
        raise InputError(
            f"gradient_scale: {accumulation=}.\nGive by how much a trainer divides the loss, 1 or more."
        )
    parts, rest = _wrappers_in(model)
    kinds = {(*_kind(part), part in _summing) for part in parts}
    if rest:
        kinds.add(("none", 1, False))
    if len(kinds) > 1:
        raise InputError(
            "gradient_scale: parts of the model are wrapped in different ways, or not at all.\n"
            "Ask for each part."
        )
    ((kind, ranks, sums),) = kinds
    if kind == "none":
        return GradientScale("no wrapper", 1 / accumulation, "nothing is summed.")
    if sums:
        return GradientScale(kind, 1 / accumulation, "it sums, as sum_gradients asked it to.")
    why = f"it takes the mean over {ranks} ranks"
    if kind == "DeepSpeed":
        accumulation *= int(parts[0].gradient_accumulation_steps())  # type: ignore[operator]
    if accumulation > 1:
        why += f", and the loss is divided by {accumulation} accumulation steps"
    return GradientScale(kind, 1 / (ranks * accumulation), f"{why}.")


def sum_gradients(model: M) -> M:
    """Make DDP or FSDP2 sum the gradients of the ranks, instead of their mean; return ``model``.

        rank 0   A                          A + B + C
        rank 1   B    model's backward ---> A + B + C
        rank 2   C                          A + B + C

    For DDP it registers a communication hook, and so must come first and once. For FSDP2 it sets the
    divide factor of the module and of every sharded module inside to 1, and lets sums be sums:
    Gloo has no multiplied ones.

    Under DDP gradients of earlier micro-batches would be summed again with each backward: accumulate
    under ``no_sync``, in all but the last.

    Cost: none; the mean is the sum with a division.
    """
    parts, _ = _wrappers_in(model)
    kind = _kind(parts[0])[0] if parts else "none"
    if kind == "DDP" and len(parts) == 1:
        wrappers.sum_in_ddp(parts[0])
    elif kind == "FSDP2":
        wrappers.sum_in_fsdp(_unwrapped(model))
    else:
        raise InputError(
            f"sum_gradients: {type(model).__name__} is neither a DDP nor an FSDP2 module.\n"
            "Wrap the model first; elsewhere, divide the loss by gradient_scale(model).factor."
        )
    _summing.update(parts)
    return model


def _unwrapped(model: nn.Module) -> nn.Module:
    """What torch.compile made its module of."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


def _wrappers_in(model: nn.Module) -> tuple[list[nn.Module], bool]:
    """The modules that synchronise gradients of ``model``, and whether some have none that does."""
    model = _unwrapped(model)
    if _kind(model)[0] in {"DDP", "FSDP1", "DeepSpeed"}:
        return [model], False
    parts = wrappers.fsdp_modules(model) or [m for m in model.modules() if wrappers.is_ddp(m)]
    rest = {p for p in model.parameters() if p.requires_grad}
    rest.difference_update(*(part.parameters() for part in parts))
    return parts, bool(rest) or not parts


def _kind(model: nn.Module) -> tuple[str, int]:
    """The wrapper's name, and the number of ranks that it synchronises."""
    if wrappers.is_ddp(model):
        return "DDP", wrappers.ranks_of_ddp(model)
    if wrappers.fsdp_modules(model):
        return "FSDP2", wrappers.ranks_of_fsdp(model)
    names = {base.__name__ for base in type(model).__mro__}
    if "FullyShardedDataParallel" in names:
        return "FSDP1", fsdp1_ranks(model)
    if "DeepSpeedEngine" in names:
        return "DeepSpeed", int(model.dp_world_size)  # type: ignore[arg-type]
    return "none", 1
