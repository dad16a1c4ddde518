"""The handshake before a loss: one small message that lets a mistake of one rank raise on every rank.

Each rank sends a description of its arguments, receives all ranks', and checks them all against the
same rules. So every rank raises the same error, with the same table. It is that of clip_loss,
siglip_loss and info_nce_loss; the other losses have agreement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from hashlib import blake2b
from operator import or_
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from allgrad._autograd.below_transforms import below_transforms, in_vmap
from allgrad._wire.calls import resolve
from allgrad._wire.consistency import refuse
from allgrad.collectives._sizes import given_sizes
from allgrad.collectives.all_gather import all_gather
from allgrad.errors import InputError, ModeError, SizesError, rank_table
from allgrad.losses._arguments.agreement import (
    Agreement,
    exchange_texts,
    gather_rows,
    may_be_expected,
    no_values,
)
from allgrad.losses._arguments.argument_rules import check_args, require_pairs
from allgrad.losses._arguments.expected_calls import as_expected, history_of
from allgrad.losses._arguments.rank_args import OPTIONS_BYTES, GradNeeds, RankArgs, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from allgrad._wire.calls import Call
    from allgrad.losses._kind import LossKind
    from allgrad.types import GroupLike, Sizes

__all__ = ["GlobalBatch", "exchange_args"]


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """What every rank knows after the handshake."""

    rank: int
    pairs: tuple[int, ...]  # by rank
    keys: tuple[int, ...]  # by rank
    needs: GradNeeds  # of any rank
    agreed: Agreement | None = None  # of a call that may be expected next time, or is now


def exchange_args(
    name: str,
    features: Mapping[str, object],
    scalars: Mapping[str, object],
    *,
    kind: LossKind,
    options: str,
    needs: GradNeeds,
    sizes: Sizes,
    group: GroupLike,
    is_changed: bool = False,
) -> GlobalBatch:
    """Exchange the arguments of all ranks; raise on every rank if a rule is broken.

    A call that is expected exchanges nothing here: its row travels with the first gather, which raises
    ``Changed`` if another rank's is another. After that, the call ``is_changed``.

    With ``sizes`` given nothing is exchanged and nothing is read from the device: each rank checks
    its own arguments only, and in grad mode every gradient is assumed to be needed on some rank. In
    checked mode a mistake that it finds there raises on the others too.
    """
    device = next((x.device for x in features.values() if isinstance(x, Tensor)), None)
    call = resolve(name, group)
    own = RankArgs(
        kind,
        _digest(options),
        needs,
        tuple([TensorSpec.of(key, x, read=False) for key, x in features.items()]),
        tuple(
            [
                TensorSpec.of(key, x, read=sizes is None and _is_readable(x, call.size))
                for key, x in scalars.items()
            ]
        ),
    )
    if sizes is not None:
        return _without_exchange(name, own, sizes, group, device)
    if call.size == 1:
        return _check_alone(name, own)
    words, history = own.encode(), history_of(call.group)
    # On a device that every rank has, wherever its features are.
    message_device = call.group.message_device(device or torch.device("cpu"))
    try:
        if not is_changed and may_be_expected():
            found = as_expected(history, words, call.rank, group)
            if found is not None:
                return _of_all_ranks(Agreement.expected(call.rank, words, found, history))
        received = below_transforms(gather_rows, name, words, str(own), group, message_device)
    except BaseException:
        history.forget()
        raise
    ranks = _decoded(own, received)
    distinct = {id(args): args for args in ranks}.values()
    rows: Sequence[object] = ranks
    if len({args.kind for args in distinct}) == 1 < len({args.options for args in distinct}):
        text = f"\n\n{own}, {options}"
        rows = [row for *_, row in below_transforms(exchange_texts, text, group, message_device)]
    _check_all(name, ranks, rows)
    if device is not None and device.type == "meta":
        raise ModeError(f"{name}: {no_values('the numbers of pairs of all ranks')}")
    counts = tuple((args.pairs, args.keys, int(args.needs)) for args in ranks)
    return _of_all_ranks(Agreement(call.rank, counts, history.add(received, counts)))


def _of_all_ranks(agreed: Agreement) -> GlobalBatch:
    needs = reduce(or_, agreed.column(2))
    return GlobalBatch(agreed.rank, agreed.column(0), agreed.column(1), GradNeeds(needs), agreed)


@lru_cache(maxsize=256)
def _digest(options: str) -> int:
    digest = blake2b(options.encode(), digest_size=OPTIONS_BYTES).digest()
    return int.from_bytes(digest, "little")


def _is_readable(x: object, world: int) -> bool:
    """Whether a number is read: one rank alone does not wait for its device to check it."""
    if not isinstance(x, Tensor):
        return True
    return not x.is_meta and not in_vmap() and (world > 1 or not x.is_cuda)


@lru_cache(maxsize=1024)
def _check_alone(name: str, own: RankArgs) -> GlobalBatch:
    _check_all(name, [own], [own])
    return GlobalBatch(0, (own.pairs,), (own.keys,), own.needs)


def _check_all(name: str, ranks: Sequence[RankArgs], rows: Sequence[object]) -> None:
    """``rows`` are what the error shows of each rank."""
    check_args(
        name, ranks, lambda rule, marks, advice: rank_table(rule, [*map(str, rows)], marks, advice)
    )
    require_pairs(name, sum(args.pairs for args in ranks))


def _decoded(own: RankArgs, rows: list[list[int]]) -> list[RankArgs]:
    # Ranks with equal batches send equal messages; decode each distinct message once.
    decoded: dict[tuple[int, ...], RankArgs] = {}
    ranks = []
    for sender, row in enumerate(map(tuple, rows)):
        if row not in decoded:
            decoded[row] = own.decode(row, sender)
        ranks.append(decoded[row])
    return ranks


def _without_exchange(
    name: str, own: RankArgs, sizes: Sizes, group: GroupLike, device: torch.device | None
) -> GlobalBatch:
    call = resolve(name, group)
    try:
        _check_own(name, own)
        pairs = _given_pairs(name, call, own, sizes)
    except InputError as error:
        refuse(call, error)
    keys = pairs
    if any(spec.given == "tensor" for spec in own.features[2:]):  # ranks may have different numbers
        if device is not None and device.type == "meta":
            raise ModeError(f"{name}: {no_values('the numbers of further keys of all ranks')}")
        further = [own.keys - own.pairs]

        def by_rank() -> list[int]:
            extra = torch.tensor(further, device=device)
            joined = all_gather(extra, sizes="equal", group=group, grad="none")
            return cast("list[int]", joined.tolist())

        found = below_transforms(by_rank)
        keys = tuple(a + b for a, b in zip(pairs, found, strict=True))
    needs = own.needs
    if call.size > 1:
        needs = GradNeeds.KEYS | GradNeeds.ANY if torch.is_grad_enabled() else GradNeeds(0)
    return GlobalBatch(call.rank, pairs, keys, needs)


def _given_pairs(name: str, call: Call, own: RankArgs, sizes: Sizes) -> tuple[int, ...]:
    equal = isinstance(sizes, str) and sizes == "equal"
    pairs = (own.pairs,) * call.size if equal else tuple(given_sizes(name, call, sizes))
    if pairs[call.rank] != own.pairs:
        raise SizesError(
            f"{name}: sizes={list(pairs)} say that rank {call.rank} holds {pairs[call.rank]} pairs, "
            f"but it holds {own.pairs}.\nGive what each rank holds, in rank order."
        )
    require_pairs(name, sum(pairs))
    return pairs


@lru_cache(maxsize=1024)
def _check_own(name: str, own: RankArgs) -> None:
    check_args(name, [own], lambda rule, _, advice: f"{rule}\n  here: {own}\n{advice}")
