"""Cross entropy over a vocabulary that is split among ranks, without the matrix of logits."""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeAlias, cast
from zlib import crc32

import torch
from torch import Tensor

from allgrad._autograd.below_transforms import in_vmap
from allgrad._wire import consistency, ended_ranks
from allgrad._wire.calls import resolve
from allgrad._wire.groups import find_group
from allgrad.collectives._sizes import given_sizes
from allgrad.collectives.all_gather import all_gather
from allgrad.collectives.all_reduce import share
from allgrad.errors import (
    AllgradError,
    InputError,
    ModeError,
    PieceMismatch,
    SizesError,
    TensorError,
)
from allgrad.losses._arguments.agreement import CallSpec, agree, grad_mode, require, unreadable
from allgrad.losses._arguments.feature_checks import options_text, require_dense, require_device
from allgrad.losses._arguments.mistakes_with_sums import gather_with_mistakes, sums_of_a_mistake
from allgrad.losses._arguments.rank_args import FLOATING
from allgrad.losses._arguments.same_numbers import require_alike
from allgrad.losses._graphs.in_graphs import in_graphs
from allgrad.losses._rows.vocabulary import is_one_formula, of_all_words, sums_of_own_words
from allgrad.losses._tiles.exponentials import logsumexp

if TYPE_CHECKING:
    from collections.abc import Callable

    from allgrad._wire.calls import Call
    from allgrad.types import GroupLike, Sizes

__all__ = ["Reduction", "cross_entropy"]

Reduction: TypeAlias = Literal["mean", "sum", "none"]

P = ParamSpec("P")

_DIGESTS = 1 << 24  # numbers that a float32 holds exactly
_MOST_WORDS = 1 << 62


def _takes_autocast(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Let the loss take activations that autocast made beside parameters, also in a graph."""

    @wraps(loss)
    def call(hidden: Any, weight: Any, *args: Any, bias: Any = None, **options: Any) -> Tensor:
        hidden, weight, bias = _in_one_dtype(hidden, weight, bias)
        return cast("Any", loss)(hidden, weight, *args, bias=bias, **options)  # type: ignore[no-any-return]

    return cast("Callable[P, Tensor]", call)


def _in_one_dtype(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast would make of them where their dtypes differ: activations beside parameters."""
    given = [x for x in (hidden, weight, bias) if isinstance(x, Tensor)]
    if len({x.dtype for x in given}) == 1 or not all(x.dtype in FLOATING for x in given):
        return hidden, weight, bias
    device = given[0].device.type
    if not torch.is_autocast_enabled(device) or len(given) < 2 + (bias is not None):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


@_takes_autocast
@in_graphs
def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    sizes: Sizes = None,
    group: GroupLike = None,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T`` where each rank holds the weights of some words.

        rank 0   hidden   targets   weight of words 0 1            loss
        rank 1   hidden   targets   weight of words 2 3     --->   loss
        rank 2   hidden   targets   weight of word  4              loss

    It equals ``torch.nn.functional.cross_entropy`` of all words' logits. Every rank passes the same
    ``hidden`` (..., width) and the same ``targets`` (...), numbers of words in the joined vocabulary,
    and its own ``weight`` (words, width), ``bias`` (words). Pieces may differ, but none may be empty.

    Gradient: every rank does the same work with the loss, so it counts once, as behind a
    ``RowParallelLinear``. ``hidden`` is one value that each rank uses in its own way: its gradient is
    the sum over ranks, as in a ``ColumnParallelLinear``. Each rank gets the gradient of its own words.

        rank 0   H0 + H1 + H2      W0 W1
        rank 1   H0 + H1 + H2      W2 W3     <---   one loss
        rank 2   H0 + H1 + H2      W4

    If each rank holds its own tokens, join both first: ``all_gather(hidden, grad="same")``.

    ``sizes`` are the numbers of words by rank; if None, one small message exchanges them, and a
    mistake of one rank raises on all, with a table. With sizes given the others learn of a mistake
    with the sums: on CPUs they raise, on a device their loss is NaN. If neither ``hidden`` nor
    ``targets`` is a tensor there, they wait some seconds. Sums are kept in float32, or in float64.

    Cost: the logits of a chunk of rows (64 MiB) exist at a time, and are computed again in backward, unless
    there are at most 2 million on this rank (on a device 16 million). With several chunks of 16 bits, the
    weight and its gradient exist in float32 too. Forward sends two numbers for each row, three with label
    smoothing; backward the gradient of ``hidden``.
    """
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias}

    def check() -> CallSpec:
        _check_tensors(hidden, weight, targets, bias)
        _check_options(label_smoothing, reduction, ignore_index)
        same = {
            "shape of hidden": tuple(hidden.shape),
            "dtype": hidden.dtype,
            **grad_mode(),
            "options": options_text(
                bias=bias is not None,
                ignore_index=ignore_index,
                label_smoothing=float(label_smoothing),
                reduction=reduction,
            ),
        }
        if sizes is not None:
            return CallSpec(same, ())
        alone = find_group("cross_entropy", group).size == 1
        checksum, low, high = _summary(targets, ignore_index, compared=not alone)
        past = min(high, _MOST_WORDS) + 1  # of more, an error all the same
        return CallSpec({**same, "targets": checksum}, (len(weight), int(low < 0), past))

    digest = 0  # of what the ranks compare with the sums
    if sizes is None:
        agreed = agree("cross_entropy", arguments, check, group)
        rank, words = agreed.rank, agreed.column(0)
        low, high = -max(agreed.column(1)), max(agreed.column(2)) - 1
        _check_range(low, high, sum(words), ignore_index)
        require_alike("cross_entropy", "hidden", hidden, group)
    else:
        rank, words, digest = _checked_with_sizes(
            check, hidden, weight, targets, ignore_index, label_smoothing, sizes, group
        )

    flat = targets.reshape(-1).long()  # ignore_index may be beyond 32 bits
    counted = flat != ignore_index
    if len(words) == 1 and is_one_formula(hidden, weight, bias):
        rows = hidden.reshape(targets.numel(), hidden.shape[-1])
        alone = of_all_words(rows, weight, bias, flat, counted, label_smoothing, reduction)
        return alone.reshape(targets.shape) if reduction == "none" else alone
    own = _Words(sum(words[:rank]), words[rank], sum(words)).indices(flat, counted)
    rows = share(hidden, group=group).reshape(targets.numel(), hidden.shape[-1])
    parts = sums_of_own_words(rows, weight, bias, own, smoothed=label_smoothing > 0)
    # All ranks' sums in one message; each rank does the same with them.
    if sizes is None:
        found = all_gather(parts[None], sizes="equal", group=group, grad="same")
    else:
        found = gather_with_mistakes(parts, digest, group)
    lse, target, *more = found.unbind(1)
    losses = logsumexp(lse, 0) - (1 - label_smoothing) * target.sum(0)
    if more:
        losses = losses - label_smoothing / sum(words) * more[0].sum(0)
    losses = torch.where(counted, losses, 0)
    if reduction == "none":
        return losses.reshape(targets.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def _checked_with_sizes(  # noqa: PLR0917
    check: Callable[[], CallSpec],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    sizes: Sizes,
    group: GroupLike,
) -> tuple[int, tuple[int, ...], int]:
    """The rank, the words by rank, and a digest of what all ranks must have; nothing is exchanged."""
    try:
        # Before a mistake is found: ranks number their calls.
        call = resolve("cross_entropy", group)
        same: list[object] = [check().same]
        rank, words = _given_words(call, weight, sizes)
        if targets.device.type == "cpu" and not in_vmap():  # on a device it would be a wait
            checksum, low, high = _summary(targets, ignore_index)
            _check_range(low, high, sum(words), ignore_index)
            same.append(checksum)
        digest = crc32(repr([*same, words]).encode()) % _DIGESTS
    except Exception as error:  # noqa: BLE001  no rank may wait for this one
        problem = error if isinstance(error, AllgradError) else unreadable(error)
        if isinstance(problem, (InputError, ModeError)):
            problem = type(problem)(_with_name(problem))
        smoothed = isinstance(label_smoothing, (int, float)) and label_smoothing > 0
        nothing = sums_of_a_mistake(hidden, weight, targets, 3 if smoothed else 2)
        if nothing is None:  # the others end their wait after some seconds; if checked, now
            ended_ranks.publish(problem)
            consistency.refuse(resolve("cross_entropy", group), problem)
        with suppress(AllgradError):  # this rank's own error says more than one of sizes
            share(nothing, group=group)  # as the others did
            all_gather(nothing, sizes="equal", group=group, grad="same")
        raise problem from None
    return rank, words, digest


class _Words(NamedTuple):
    """The words of this rank in the joined vocabulary."""

    first: int
    own: int
    total: int

    def indices(self, targets: Tensor, counted: Tensor) -> Tensor:
        """Each target's row in this rank's weight, or -1 if another rank has it or it is ignored."""
        here = (targets >= self.first) & (targets < self.first + self.own) & counted
        known = (targets >= 0) & (targets < self.total) | ~counted
        # A target out of range is out of range in the lookup too, which notices it without a wait.
        return torch.where(here, targets - self.first, torch.where(known, -1, self.own)).long()


def _summary(targets: Tensor, ignore_index: int, *, compared: bool = True) -> tuple[int, int, int]:
    """A checksum of the targets if they are ``compared``, and the lowest and highest one that counts."""
    flat = targets.reshape(-1).long()
    counted, none = torch.where(flat == ignore_index, 0, flat), flat.new_zeros(1)
    if not compared:
        low, high = torch.stack(torch.cat([counted, none]).aminmax()).tolist()
        return 0, low, high
    places = torch.arange(1, len(flat) + 1, device=flat.device)
    # A sum of products alone is the same for many targets. Large odd numbers mix their bits.
    mixed = (flat + places * 0x9E3779B97F4A7C1) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 29)) * 0x14D049BB133111EB
    found = torch.cat([(mixed ^ (mixed >> 32)).sum()[None], counted, none])
    checksum, low, high = torch.stack([found[0], *found[1:].aminmax()]).tolist()
    return checksum, low, high


def _check_tensors(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    for name, x in (("hidden", hidden), ("weight", weight)):
        require(
            isinstance(x, Tensor) and x.dtype in FLOATING,
            TensorError,
            f"{name} is not a floating-point tensor.",
            "Give hidden and weight in float32, bfloat16, float16 or float64.",
        )
    require(
        isinstance(targets, Tensor) and targets.dtype in {torch.int64, torch.int32},
        TensorError,
        "targets are not a tensor of whole numbers.",
        "Give the indices of words as int64.",
    )
    tensors = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias}
    for name, given in tensors.items():
        if given is not None:
            require_dense(name, given)
    require_device(tensors, "hidden", hidden)
    require(
        hidden.dim() > 0 and weight.dim() == 2 and weight.shape[1] == hidden.shape[-1],
        PieceMismatch,
        "hidden and weight have other widths.",
        "Give hidden as (..., width) and weight as (words, width).",
    )
    require(
        hidden.dtype == weight.dtype and (bias is None or bias.dtype == weight.dtype),
        PieceMismatch,
        "the dtypes of hidden, weight and bias differ.",
        "Cast them to one dtype before the call.",
    )
    require(
        targets.shape == hidden.shape[:-1],
        PieceMismatch,
        "targets and hidden have different numbers of rows.",
        "Give one target for each row of hidden.",
    )
    require(
        bias is None or bias.shape == weight.shape[:1],
        PieceMismatch,
        "bias and weight have different numbers of words.",
        "Give one number for each word of this rank.",
    )
    require(
        len(weight),
        PieceMismatch,
        "this rank's piece of the vocabulary is empty.",
        "Give each rank at least one word, or use a smaller group.",
    )


def _check_options(label_smoothing: float, reduction: str, ignore_index: int) -> None:
    require(
        0 <= label_smoothing <= 1,
        InputError,
        f"label_smoothing={label_smoothing!r}.",
        "Give a number from 0 to 1.",
    )
    require(
        reduction in {"mean", "sum", "none"},
        InputError,
        f"there is no reduction={reduction!r}.",
        'Use "mean", "sum" or "none".',
    )
    require(
        isinstance(ignore_index, Integral),
        InputError,
        f"ignore_index={ignore_index!r}.",
        "Give a whole number.",
    )


def _given_words(call: Call, weight: Tensor, sizes: Sizes) -> tuple[int, tuple[int, ...]]:
    equal = isinstance(sizes, str) and sizes == "equal"
    words = (
        (len(weight),) * call.size if equal else tuple(given_sizes("cross_entropy", call, sizes))
    )
    if words[call.rank] != len(weight):
        raise SizesError(
            f"cross_entropy: sizes={list(words)} say that rank {call.rank} holds "
            f"{words[call.rank]} words, but it holds {len(weight)}.\n"
            "Give what each rank holds, in rank order."
        )
    return call.rank, words


def _with_name(problem: AllgradError) -> str:
    text = str(problem)
    return text if text.startswith("cross_entropy") else f"cross_entropy: {text}"


def _check_range(low: int, high: int, words: int, ignore_index: int) -> None:
    if low < 0 or high >= words:
        raise InputError(
            f"cross_entropy: a target is {'negative' if low < 0 else high}, but the vocabulary has "
            f"{words} words.\nGive targets from 0 to {words - 1}, or ignore_index={ignore_index}."
        )
