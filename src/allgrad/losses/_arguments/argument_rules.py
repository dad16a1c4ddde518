"""The rules for the arguments of a loss, checked over all ranks."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from allgrad.errors import InputError, PieceMismatch, TensorError
from allgrad.losses._arguments.rank_args import GradNeeds

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from allgrad.losses._arguments.rank_args import RankArgs, TensorSpec

__all__ = ["check_args", "require_pairs"]


class Rule(NamedTuple):
    """One rule. A rule may assume that those before it in ``_RULES`` hold.

    ``violation(args, model)`` says what is wrong with a rank's arguments, or gives None. If the ranks
    must agree on something, it is ``key``, and ``model`` is a rank that has the most common one.
    """

    error: type[InputError]
    text: str
    violation: Callable[[RankArgs, RankArgs], str | None]
    advice: str
    key: Callable[[RankArgs], Hashable] | None = None


def check_args(
    name: str,
    ranks: Sequence[RankArgs],
    message: Callable[[str, Mapping[int, str], str], str],
) -> None:
    """Raise if a rule is broken. ``message`` makes the error's text of rule, marks by rank, and advice."""
    distinct = {id(args): args for args in ranks}.values()
    for rule in _RULES:
        if any(rule.violation(args, ranks[0]) is not None for args in distinct):
            model = ranks[0] if rule.key is None else _most_common(ranks, rule.key)
            found = ((rank, rule.violation(args, model)) for rank, args in enumerate(ranks))
            marks = {rank: text for rank, text in found if text is not None}
            names = dict(zip(("query", "key"), _names(ranks), strict=False))
            text, advice = rule.text.format(**names), rule.advice.format(**names)
            raise rule.error(message(f"{name}: {text}", marks, advice))


def require_pairs(name: str, total: int) -> None:
    if not total:
        raise InputError(f"{name}: no rank has a pair.\nGive at least one rank a pair.")


def _names(ranks: Sequence[RankArgs]) -> list[str]:
    return [spec.name for spec in ranks[0].features]


def _most_common(ranks: Sequence[RankArgs], key: Callable[[RankArgs], Hashable]) -> RankArgs:
    ((most, _),) = Counter(map(key, ranks)).most_common(1)
    return next(args for args in ranks if key(args) == most)


def _options(args: RankArgs) -> Hashable:
    return args.kind, args.options


def _dtype(args: RankArgs) -> Hashable:
    return args.features[0].dtype


def _width(args: RankArgs) -> Hashable:
    return args.features[0].shape[-1]


def _other_call(args: RankArgs, model: RankArgs) -> str | None:
    if args.kind is not model.kind:
        return "another loss"
    return None if args.options == model.options else "other options"


def _bad_features(args: RankArgs, _: RankArgs) -> str | None:
    for index, spec in enumerate(args.features):
        optional = index >= 2
        if optional and spec.given == "none":
            continue
        if spec.given != "tensor":
            return f"{spec.name} is {spec.kind}"
        if not spec.is_floating:
            return f"{spec.name} is not floating-point"
        if len(spec.shape) != 2 and not (optional and len(spec.shape) == 3):
            return f"{spec.name} has {len(spec.shape)} dimensions"
    return None


def _other_dtype(args: RankArgs, model: RankArgs) -> str | None:
    return _first(args, lambda spec: spec.dtype != _dtype(model), "another dtype of {}")


def _device_type(args: RankArgs) -> str:
    return args.features[0].device[0]


def _other_device(args: RankArgs, model: RankArgs) -> str | None:
    own = args.features[0].device
    if own[0] != _device_type(model):
        return f"{args.features[0].name} is on {args.features[0].place}"
    odd = [spec for spec in args.features if spec.given != "none" and spec.device != own]
    if own[0] != "meta":  # a number is moved to the features, from wherever it has a value
        odd += [spec for spec in args.scalars if spec.device[0] == "meta"]
    return f"{odd[0].name} is on {odd[0].place}" if odd else None


def _other_width(args: RankArgs, model: RankArgs) -> str | None:
    return _first(args, lambda spec: spec.shape[-1] != _width(model), "another width of {}")


def _first(args: RankArgs, differs: Callable[[TensorSpec], bool], text: str) -> str | None:
    given = (spec for spec in args.features if spec.given != "none")
    return next((text.format(spec.name) for spec in given if differs(spec)), None)


def _unpaired(args: RankArgs, _: RankArgs) -> str | None:
    query, key = args.features[:2]
    return None if query.vectors == key.vectors else f"{query.vectors} and {key.vectors}"


def _bad_scalar(args: RankArgs, _: RankArgs) -> str | None:
    for index, spec in enumerate(args.scalars):
        if spec.given == "none":
            if index:  # the bias is optional
                continue
            return f"{spec.name} is missing"
        if spec.given == "DTensor":
            return f"{spec.name} is a DTensor"
        if not spec.is_floating:
            return f"{spec.name} is not a floating-point number"
        if math.prod(spec.shape) != 1:
            return f"{spec.name} has shape {spec.shape}"
        if not math.isfinite(spec.value):
            return f"{spec.name} is {spec.value}"
    return None


def _grad_mode(args: RankArgs) -> bool:
    return GradNeeds.MODE in args.needs


def _other_grad_mode(args: RankArgs, model: RankArgs) -> str | None:
    if _grad_mode(args) == _grad_mode(model):
        return None
    return f"grad mode is {'on' if _grad_mode(args) else 'off'}"


def _given(args: RankArgs) -> tuple[bool, ...]:
    return tuple(spec.given != "none" for spec in args.scalars)


def _other_scalars(args: RankArgs, model: RankArgs) -> str | None:
    return None if _given(args) == _given(model) else "another choice"


_RULES = (
    Rule(
        InputError,
        "all ranks must call the same loss with the same options.",
        _other_call,
        "Call the same loss with the same options on every rank.",
        _options,
    ),
    Rule(
        InputError,
        "all ranks must have grad mode on, or all have it off.",
        _other_grad_mode,
        "Use torch.no_grad() or inference_mode() on every rank or on none: the others would wait in backward.",
        _grad_mode,
    ),
    Rule(
        TensorError,
        "features must be floating-point tensors with one vector in each row.",
        _bad_features,
        "Give {query} and {key} as (pairs, width) in float32, bfloat16, float16 or float64; of a DTensor "
        "its to_local().",
    ),
    Rule(
        TensorError,
        "all features of a rank must be on one device, of the same type on every rank.",
        _other_device,
        "Move them to one device before the call. Scale and bias may be on another, but not on meta.",
        _device_type,
    ),
    Rule(
        PieceMismatch,
        "all features must have the same dtype.",
        _other_dtype,
        "Cast them to one dtype before the call.",
        _dtype,
    ),
    Rule(
        PieceMismatch,
        "all features must have the same width.",
        _other_width,
        "Project both towers to the same width, on every rank.",
        _width,
    ),
    Rule(
        PieceMismatch,
        "{query} and {key} must have the same number of rows.",
        _unpaired,
        "Give both towers the same number of rows on a rank; ranks may differ.",
    ),
    Rule(
        InputError,
        "scale and bias must be single finite numbers.",
        _bad_scalar,
        "Give a finite number, or a tensor of one element; of a DTensor its "
        'full_tensor(grad_placements=[Partial("avg")]), for each rank has a part of the gradient.',
    ),
    Rule(
        InputError,
        "all ranks must give a bias, or none.",
        _other_scalars,
        "Give each rank the same scale and bias.",
        _given,
    ),
)
