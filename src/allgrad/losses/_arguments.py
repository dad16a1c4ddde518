"""From a call to a contrast: what the caller asks for, agreed between the ranks."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from allgrad.errors import InputError
from allgrad.losses._engine import Contrast, contrast
from allgrad.losses._handshake import meet
from allgrad.losses._key_blocks import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from allgrad._wire.primitives import GroupLike
    from allgrad.types import Sizes

__all__ = ["BUDGET", "Grads", "contrastive"]

Grads: TypeAlias = Literal["mean", "sum"]

BUDGET = 8 << 30
_KEYS, _ANY = 1, 2
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _eager(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Under torch.compile, run as it is between two compiled parts."""
    return cast("Callable[_P, _T]", torch.compiler.disable(function))


@_eager
def contrastive(
    call: str,
    features: Mapping[str, Tensor | None],
    numbers: Mapping[str, Tensor | float | None],
    *,
    kind: Literal["rows", "both", "sigmoid"],
    label_smoothing: float = 0.0,
    grads: Grads,
    sizes: Sizes,
    group: GroupLike,
    ring: bool | None,
    budget: int,
) -> Tensor:
    """The loss of queries, keys and more keys, in this order, by what it is called."""
    asked = [_as_tensor(x) for x in numbers.values()]
    meeting = meet(
        call,
        features,
        dict(zip(numbers, asked, strict=True)),
        options=f"{call} {label_smoothing!r} {grads!r} {ring!r} {budget!r}",
        wants=_wants([*features.values()], asked),
        sizes=sizes,
        group=group,
    )
    _check_options(call, label_smoothing, grads)
    what = Contrast(
        call,
        Place(meeting.rank, meeting.columns, group),
        sum(meeting.pairs),
        sigmoid=kind == "sigmoid",
        both=kind == "both",
        smoothing=float(label_smoothing),
        grads=grads,
        wants_keys=bool(meeting.wants & _KEYS),
        wants_any=bool(meeting.wants & _ANY),
        ring=ring,
        budget=budget,
    )
    query, *columns = (x for x in features.values() if x is not None)
    key = columns[0] if len(columns) == 1 else torch.cat([x.flatten(0, -2) for x in columns])
    scale, *others = asked
    assert scale is not None
    return contrast(what, query, key, scale, others[0] if others else None)


def _as_tensor(x: Tensor | float | None) -> Tensor | None:
    # A float32 would round a scale that somebody wrote down for float64 features.
    return torch.tensor(float(x), dtype=torch.float64) if isinstance(x, Real) else x  # type: ignore[return-value]


def _wants(features: list[Tensor | None], numbers: list[Tensor | None]) -> int:
    """What gradients this rank needs, as bits: those of keys, and any."""
    if not torch.is_grad_enabled():
        return 0
    keys = any(isinstance(x, Tensor) and x.requires_grad for x in features[1:])
    others = any(isinstance(x, Tensor) and x.requires_grad for x in [*features[:1], *numbers])
    return (_KEYS if keys else 0) | (_ANY if keys or others else 0)


def _check_options(call: str, label_smoothing: float, grads: Grads) -> None:
    if grads not in {"mean", "sum"}:
        raise InputError(
            f'{call}: there is no grads={grads!r}.\nUse "mean" where a wrapper averages gradients '
            'over ranks (DDP, FSDP), "sum" where it sums them.'
        )
    if not 0 <= label_smoothing <= 1:
        raise InputError(
            f"{call}: label_smoothing={label_smoothing!r}.\nGive a number from 0 to 1."
        )
