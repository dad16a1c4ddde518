"""From the arguments of a public loss to the engine: handshake, options, tensors."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from allgrad._autograd.below_transforms import batch_sizes, in_vmap
from allgrad._wire.calls import resolve
from allgrad._wire.consistency import refuse
from allgrad.errors import InputError
from allgrad.losses._arguments.agreement import run_agreed
from allgrad.losses._arguments.expected_calls import Changed
from allgrad.losses._arguments.feature_checks import number, plain_number
from allgrad.losses._arguments.handshake import exchange_args
from allgrad.losses._arguments.rank_args import GradNeeds, grad_needs
from allgrad.losses._arguments.same_numbers import require_same_numbers
from allgrad.losses._computed_on import computed_on
from allgrad.losses._pairs.alone_on_cuda import loss_of_one_rank
from allgrad.losses._pairs.config import LossConfig
from allgrad.losses._pairs.config_cache import recall, remember, signature
from allgrad.losses._pairs.engine import contrastive_loss
from allgrad.losses._pairs.key_blocks import KeyLayout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from allgrad.losses._kind import LossKind
    from allgrad.types import GroupLike, Sizes

__all__ = ["BUDGET", "GradReduction", "global_loss"]

GradReduction: TypeAlias = Literal["mean", "sum"]

BUDGET = 8 << 30


def global_loss(
    name: str,
    kind: LossKind,
    features: Mapping[str, Tensor | None],
    scalars: Mapping[str, Tensor | float | None],
    *,
    label_smoothing: float = 0.0,
    grad_reduction: GradReduction,
    sizes: Sizes,
    group: GroupLike,
    ring: bool | None,
    budget: int,
) -> Tensor:
    """The loss over all ranks. ``features`` are queries, keys and further keys, in this order.

    The names in ``features`` and ``scalars`` are those of the public function, for error messages.
    """
    smoothing = plain_number(label_smoothing)
    # Of other types there are errors, below.
    is_valid = (ring is None or isinstance(ring, bool)) and isinstance(budget, (int, float))
    if is_valid and isinstance(smoothing, float) and smoothing == 0:
        found = loss_of_one_rank(
            name,
            kind,
            features,
            scalars,
            grad_reduction=grad_reduction,
            sizes=sizes,
            group=group,
        )
        if found is not None:
            return found
    # Made anew in each call: a number of inference mode, or a fake one, is of no use to the next.
    numbers = {key: number(x) for key, x in scalars.items()}
    given = [*features.values()]
    # The numbers of further keys are found out in each call.
    known = len(given) == 2 or given[2] is None
    options = smoothing, grad_reduction, type(ring), ring, budget
    key = signature(name, group, sizes, (*given, *numbers.values()), *options) if known else None

    def exchanged(*, is_changed: bool) -> LossConfig:
        batches = f", batches of torch.vmap: {batch_sizes()}" if in_vmap() else ""
        batch = exchange_args(
            name,
            features,
            numbers,
            kind=kind,
            options=f"label_smoothing={smoothing}, {grad_reduction=}, {ring=}, {budget=}{batches}",
            needs=grad_needs(given, [*numbers.values()]),
            sizes=sizes,
            group=group,
            is_changed=is_changed,
        )
        try:
            _check_options(name, smoothing, grad_reduction, ring, budget)
        except InputError as error:
            refuse(resolve(name, group), error)
        return LossConfig(
            name,
            kind,
            KeyLayout(batch.rank, batch.keys, group),
            batch.pairs,
            label_smoothing=cast("float", smoothing),
            grad_reduction=grad_reduction,
            needs_key_grad=GradNeeds.KEYS in batch.needs,
            needs_grad=GradNeeds.ANY in batch.needs,
            ring=ring,
            budget=budget,
            agreed=batch.agreed,
        )

    config = recall(key)
    if config is None:
        config = exchanged(is_changed=False)
        remember(key, config)
    try:
        return _loss_of(config, given, numbers)
    except Changed:
        return _loss_of(exchanged(is_changed=True), given, numbers)


def _loss_of(
    config: LossConfig, features: Sequence[Tensor | None], numbers: Mapping[str, Tensor | None]
) -> Tensor:
    name, group = config.name, config.layout.group
    q, k, *others = (x for x in features if x is not None)
    require_same_numbers(name, numbers, q, group)
    if others:
        flat = [x.flatten(0, -2) for x in (k, *others)]
        k = computed_on(q.device, torch.cat, flat)
    scale, *biases = numbers.values()
    assert scale is not None
    inputs = q, k, scale, biases[0] if biases else None
    if config.agreed is None:
        return contrastive_loss(config, *inputs)
    return run_agreed(name, config.agreed, group, lambda: contrastive_loss(config, *inputs))


def _check_options(
    name: str, smoothing: object, grad_reduction: Any, ring: Any, budget: Any
) -> None:
    if not isinstance(grad_reduction, str) or grad_reduction not in {"mean", "sum"}:
        raise InputError(
            f'{name}: there is no grad_reduction={grad_reduction!r}.\nUse "mean" if gradients are '
            'averaged over ranks after backward (DDP, FSDP), "sum" if they are summed.'
        )
    if not isinstance(smoothing, float) or not 0 <= smoothing <= 1:
        raise InputError(f"{name}: label_smoothing={smoothing!r}.\nGive a number from 0 to 1.")
    if ring is not None and not isinstance(ring, bool):
        raise InputError(
            f"{name}: ring={ring!r}.\nGive True or False, or None to let the budget decide."
        )
    number_of_bytes: Any = budget
    if not isinstance(budget, Real) or not number_of_bytes >= 0:
        raise InputError(f"{name}: budget={budget!r}.\nGive a number of bytes.")
