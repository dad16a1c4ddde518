"""One small message before a loss: the ranks' counts, and a mistake of one rank raised on every rank.

Each rank checks its own arguments, then sends what the others must know: whether it found a
mistake, digests of what must be the same on every rank, and its counts. Only if something is wrong
do the ranks exchange texts too, so that all of them raise the same error with the same table. A call
that is expected sends its row with the first gather instead (expected_calls). clip_loss, siglip_loss
and info_nce_loss have a message of their own (handshake).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from allgrad._autograd.below_transforms import batch_sizes, below_transforms, in_vmap
from allgrad._autograd.transforms import in_lockstep, is_plain_autograd
from allgrad._core.torch_internals import in_selective_checkpoint
from allgrad._wire.calls import are_described, resolve
from allgrad._wire.codec import Reader, Writer, dtype_name, kind_of
from allgrad._wire.consistency import is_checking
from allgrad.collectives.all_gather import all_gather
from allgrad.errors import (
    AllgradError,
    InputError,
    ModeError,
    PieceMismatch,
    SizesError,
    TensorError,
    rank_table,
)
from allgrad.losses._arguments.expected_calls import Changed, as_expected, history_of
from allgrad.losses._arguments.rank_args import ROW_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from allgrad.losses._arguments.expected_calls import ExpectedCall, History
    from allgrad.types import GroupLike

__all__ = [
    "Agreement",
    "CallSpec",
    "agree",
    "agree_and",
    "exchange_texts",
    "gather_rows",
    "grad_mode",
    "may_be_expected",
    "no_values",
    "require",
    "run_agreed",
    "unreadable",
]

T = TypeVar("T")

_ERRORS: tuple[type[AllgradError] | None, ...] = (
    *(None, InputError, TensorError),
    *(PieceMismatch, SizesError, ModeError),
)
_MAX_SAME, _MAX_COUNTS = 9, 8
_DIGEST_BYTES = 7
_MOST_TEXT = 600
_GRAD_MODE = "grad mode"


class CallSpec(NamedTuple):
    """What a rank tells about its call."""

    same: Mapping[str, object]  # what must be the same on every rank, by name
    counts: tuple[int, ...]  # what may differ


@dataclass(slots=True)
class Agreement:
    """What every rank knows afterwards."""

    rank: int
    counts: tuple[tuple[int, ...], ...]  # by rank
    call: ExpectedCall | None = None  # None for one rank alone
    row: Tensor | None = None  # of this rank, to be sent with the first gather
    history: History | None = None
    is_confirmed: bool = False  # the first gather has come: every rank makes this call

    @staticmethod
    def expected(rank: int, words: list[int], call: ExpectedCall, history: History) -> Agreement:
        row = torch.tensor(words, dtype=torch.int64, device="cpu")
        return Agreement(rank, call.counts, call, row, history)

    def confirm(self, received: Tensor | None) -> None:
        """Raise ``Changed`` unless the rows of all ranks, joined, are those that were expected."""
        if received is not None:
            assert self.call is not None
            assert self.history is not None
            if received.tolist() != self.call.words.tolist():
                raise Changed
            if not self.is_confirmed:
                self.history.came(self.call)
        self.is_confirmed = True

    def column(self, number: int) -> tuple[int, ...]:
        """One of the counts, by rank."""
        return tuple(row[number] for row in self.counts)


class _Row(NamedTuple):
    """The message of one rank."""

    name: int
    error: type[AllgradError] | None
    same: tuple[int, ...]
    counts: tuple[int, ...]

    def encode(self) -> list[int]:
        message = Writer("loss")
        message.number(self.name)
        message.choice(self.error, _ERRORS)
        message.number(len(self.same), *self.same, len(self.counts), *self.counts)
        return message.padded(ROW_WORDS)

    @staticmethod
    def decode(words: Sequence[int], sender: int) -> _Row:
        message = Reader(words, "loss", sender)
        name, error = message.number(), message.choice(_ERRORS)
        same = message.numbers(message.number(0, _MAX_SAME))
        return _Row(name, error, same, message.numbers(message.number(0, _MAX_COUNTS)))


def require(condition: object, error: type[InputError], rule: str, advice: str) -> None:
    """Raise unless a rule about this rank's own arguments holds."""
    if not condition:
        # A line each: what an argument prints may have several.
        raise error("\n".join(" ".join(text.split()) for text in (rule, advice)))


def run_agreed(name: str, agreed: Agreement, group: GroupLike, compute: Callable[[], T]) -> T:
    """``compute``, which raises ``Changed`` if a rank turns out to call something else."""
    try:
        return compute()
    except (Changed, InputError):
        raise
    except BaseException:
        # Once the gather has come, all ranks remember the same call, also where one of them alone fails
        # after its last message (test_a_rank_that_fails_alone_expects_what_the_others_do).
        if not agreed.is_confirmed:
            history_of(resolve(name, group).group).forget()
        raise


def agree_and(
    name: str,
    arguments: Mapping[str, object],
    check: Callable[[], CallSpec],
    group: GroupLike,
    compute: Callable[[Agreement], Tensor],
) -> Tensor:
    """``compute`` what the ranks agree on; again, if one of them turns out to call something else.

    It gathers the row of the agreement, where there is one, and confirms it before anything else.
    """
    # Once: what a checkpoint sees saved must not depend on whether a call was expected.
    check = cache(check)
    agreed = agree(name, arguments, check, group, expects=True)
    try:
        return run_agreed(name, agreed, group, partial(compute, agreed))
    except Changed:
        agreed = agree(name, arguments, check, group, is_changed=True)
    return run_agreed(name, agreed, group, partial(compute, agreed))


def grad_mode() -> dict[str, str]:
    """Compared in every loss: without grad mode on one rank, the others would wait in backward."""
    return {_GRAD_MODE: f"grad mode is {'on' if torch.is_grad_enabled() else 'off'}"}


def agree(
    name: str,
    arguments: Mapping[str, object],
    check: Callable[[], CallSpec],
    group: GroupLike,
    *,
    expects: bool = False,
    is_changed: bool = False,
) -> Agreement:
    """Exchange the counts of all ranks; raise on every rank if one of them made a mistake.

    ``check`` raises an ``InputError`` of two lines, the rule and what to do, if this rank's
    arguments are wrong. ``arguments`` are shown in error messages. With ``expects`` the counts may be those
    of the expected call, not yet confirmed (``agree_and``). With ``is_changed`` they were wrong, and the
    ranks exchange their rows now.
    """
    call = resolve(name, group)
    problem: AllgradError | None = None
    spec = CallSpec({}, ())
    try:
        spec = check()
    except (InputError, ModeError) as found:
        problem = found
    except Exception as found:  # noqa: BLE001  no rank may wait for this one
        problem = unreadable(found)
    if call.size == 1:
        if problem is not None:
            raise type(problem)(f"{name}: {_with_row(problem, _shown(arguments))}")
        return Agreement(0, (spec.counts,))
    shown = _shown(arguments)
    devices = (_device(x) for x in arguments.values())
    device = next((found for found in devices if found is not None), torch.device("cpu"))
    kind = None if problem is None else _known(type(problem))
    same = {**spec.same, "device": device.type}
    if in_vmap():
        same["batch sizes of torch.vmap"] = batch_sizes()
    own = _Row(_digest(name), kind, tuple(map(_digest, same.values())), spec.counts)
    words, labels = own.encode(), list(same)
    device = call.group.message_device(device)  # the same kind on a rank that passed no tensor
    history = history_of(call.group)

    def exchange() -> tuple[list[list[int]], list[_Row], list[list[str]]]:
        received = gather_rows(name, words, shown, group, device)
        rows = [_Row.decode(one, sender) for sender, one in enumerate(received)]
        is_wrong = any(row.error or row[:3] != rows[0][:3] for row in rows)
        if not is_wrong:
            return received, rows, []
        more = [
            str(spec.same[x]) for x in ("options", "queue", _GRAD_MODE) if _differ(rows, labels, x)
        ]
        text = f"{problem or chr(10)}\n{', '.join([shown, *more])}"
        return received, rows, exchange_texts(text, group, device)

    try:
        if not is_changed and may_be_expected():
            expected = as_expected(history, words, call.rank, group, expects=expects)
            if expected is not None:
                return Agreement.expected(call.rank, words, expected, history)
        received, rows, texts = below_transforms(exchange)
    except BaseException:
        history.forget()
        raise
    if texts:
        raise _error(name, rows, texts, labels)
    counts = tuple(row.counts for row in rows)
    return Agreement(call.rank, counts, history.add(received, counts))


def gather_rows(
    name: str, words: list[int], shown: str, group: GroupLike, device: torch.device
) -> list[list[int]]:
    """The rows of all ranks; raises on all of them if some call a loss with rows of another kind."""
    row = torch.tensor([words], dtype=torch.int64, device=device)
    received: list[list[int]] = all_gather(row, sizes="equal", group=group, grad="none").tolist()
    kinds = Counter(kind_of(row) for row in received)
    if len(kinds) > 1 and None not in kinds:
        ((usual, _),) = kinds.most_common(1)
        odd = {r: "another loss" for r, row in enumerate(received) if kind_of(row) != usual}
        texts = exchange_texts(f"\n\n{name}: {shown}", group, device)
        rule, advice = (
            f"{name}: all ranks must call the same loss.",
            "Let every rank call the same loss.",
        )
        raise PieceMismatch(rank_table(rule, [text for *_, text in texts], odd, advice))
    return received


def may_be_expected() -> bool:
    """Whether a call here may have no message of its own.

    In checked mode the ranks compare each call: there are no two ways of making one. In a region under
    selective checkpointing backward makes the call again, of the same ops.
    """
    is_plain = is_plain_autograd() and not in_lockstep() and not are_described()
    return is_plain and not in_selective_checkpoint()


def no_values(wanted: str) -> str:
    """The rule and the advice for a meta tensor where its ranks need more than shapes."""
    return (
        f"a meta tensor has a shape only, and the loss reads {wanted}.\n"
        "Give sizes= where the loss has it, or use real tensors."
    )


def unreadable(found: Exception) -> AllgradError:
    """The error of ours that stands for one of torch or Python."""
    text = f"{type(found).__name__}: {str(found).partition(chr(10))[0]}"
    if in_vmap() and isinstance(found, RuntimeError):
        return ModeError(
            f"torch.vmap maps over an argument whose values the loss must read ({text}).\n"
            "Map over features, ids and weights only (over targets with sizes=), or call it in a loop."
        )
    if "meta tensor" in text:
        return ModeError(no_values("its values"))
    return InputError(f"an argument cannot be used: {text}\nCompare them with the docs.")


def _error(
    name: str, rows: Sequence[_Row], texts: Sequence[list[str]], labels: Sequence[str]
) -> AllgradError:
    shown = [text[2] for text in texts]
    wrong = {rank: texts[rank][0] for rank, row in enumerate(rows) if row.error}
    if wrong:
        first = min(wrong)
        kind = rows[first].error or InputError
        return kind(rank_table(f"{name}: {texts[first][0]}", shown, wrong, texts[first][1]))
    columns = [
        ([row.name for row in rows], "call the same loss", "another loss"),
        ([len(row.same) for row in rows], "call the same loss", "another loss"),
    ]
    columns += [
        ([row.same[i] if i < len(row.same) else 0 for row in rows], f"have the same {label}", label)
        for i, label in enumerate(labels)
    ]
    for values, rule, label in columns:
        ((usual, _),) = Counter(values).most_common(1)
        odd = {rank: f"other {label}" for rank, value in enumerate(values) if value != usual}
        if odd:
            advice = f"Let every rank {rule}."
            return PieceMismatch(rank_table(f"{name}: all ranks must {rule}.", shown, odd, advice))
    raise AssertionError("the rows are the same")


def _differ(rows: Sequence[_Row], labels: Sequence[str], label: str) -> bool:
    """Whether ranks that compare this have other values; a rank with a mistake compares nothing."""
    if label not in labels:
        return False
    column = labels.index(label)
    compared = (row.same for row in rows if row.error is None)
    return len({same[column] for same in compared if column < len(same)}) > 1


def exchange_texts(text: str, group: GroupLike, device: torch.device) -> list[list[str]]:
    """Rule, advice and arguments of each rank; the first two are empty where nothing is wrong."""
    raw = text.encode(errors="replace")[:_MOST_TEXT].ljust(_MOST_TEXT)
    row = torch.tensor([list(raw)], dtype=torch.uint8, device=device)
    rows = all_gather(row, sizes="equal", group=group, grad="none").tolist()
    texts = [bytes(one).decode(errors="replace").rstrip() for one in rows]
    return [[*text.split("\n", 2), "", ""][:3] for text in texts]


def _with_row(problem: AllgradError, shown: str) -> str:
    rule, _, advice = str(problem).partition("\n")
    return f"{rule}\n  here: {shown}\n{advice}"


def _known(kind: type[AllgradError]) -> type[AllgradError]:
    return kind if kind in _ERRORS else InputError


def _digest(value: object) -> int:
    raw = blake2b(repr(value).encode(), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(raw, "little")


def _device(x: object) -> torch.device | None:
    if isinstance(x, (list, tuple)) and x:
        x = x[0]
    return x.device if isinstance(x, Tensor) else None


def _shown(arguments: Mapping[str, object]) -> str:
    given = {key: x for key, x in arguments.items() if x is not None}
    try:
        return ", ".join(f"{key} {_describe(x)}" for key, x in given.items())
    except Exception:  # noqa: BLE001  what cannot be shown is refused, on every rank
        return ", ".join(f"{key} {type(x).__name__}" for key, x in given.items())


def _describe(x: object) -> str:
    if isinstance(x, Tensor):
        is_number = x.dim() < 2 and x.numel() == 1 and x.is_floating_point()
        if is_checking() and is_number and not x.is_meta and not in_vmap():
            return f"{float(x.detach())}"  # checked mode compares the values of numbers
        shape = f"nested of {x.size(0)}" if x.is_nested else tuple(x.shape)
        return f"{shape} {dtype_name(x.dtype)}"
    if isinstance(x, (list, tuple)):
        return f"list of {len(x)}"
    return f"{x}" if isinstance(x, (int, float)) else type(x).__name__
