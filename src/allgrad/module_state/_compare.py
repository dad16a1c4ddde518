"""``compare`` and ``verify``: where the ranks' states differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from allgrad.errors import InputError, TensorError
from allgrad.module_state._differences import Difference, differences, mismatch, read, write
from allgrad.module_state._entries import Entry, State, entries, tensors_and_others, without
from allgrad.module_state._specs import facts, hindrance
from allgrad.module_state._text_exchange import open_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from allgrad._wire.primitives import GroupLike

__all__ = ["compare", "verify"]


def compare(
    module: State, *, group: GroupLike = None, ignore: Iterable[str] = ()
) -> list[Difference]:
    """Tell every rank where the states of the ranks differ, and who has what.

        rank 0   weight A  bias a              [weight: rank 2 has another value,
        rank 1   weight A  bias a     --->      bias: missing on rank 1]
        rank 2   weight B  bias a              the same list on every rank

    Names, kinds, shapes, dtypes, ties and values are compared, the first that differs is named.
    Values are compared bit for bit by a 128-bit hash of their elements in order: -0.0 differs from
    0.0, a NaN equals one of the same bits, strides and devices do not count. A meta tensor has
    no value. Ranks may hold different names.

    ``module`` may also be an optimizer, whose settings are compared too (objects other than
    numbers, texts and None by their type and length), or a dict of tensors by name.

    Cost: reading all values; one message of 40 bytes a rank when all is well. Otherwise the names
    and hashes travel, never the values.
    """
    return _differences("compare", module, group, ignore)


def verify(module: State, *, group: GroupLike = None, ignore: Iterable[str] = ()) -> None:
    """Raise ``StateMismatch`` on every rank unless all of them hold the same, as :func:`compare` finds.

    verify: every rank must hold the same state; 1 differs:
    fc.weight
      rank 0: (2, 8) float32 #5a2f0c8814b9
      rank 1: (2, 8) float32 #5a2f0c8814b9
      rank 2: (2, 8) float32 #e07b33911c52   <- another value
    Call allgrad.module_state.sync to give every rank the state of one of them.
    """
    if found := _differences("verify", module, group, ignore):
        raise mismatch(
            "verify: every rank must hold the same state",
            found,
            "Call allgrad.module_state.sync to give every rank the state of one of them.",
        )


def _differences(
    op: str, module: State, group: GroupLike, ignore: Iterable[str]
) -> list[Difference]:
    held: list[Entry] = []
    problem: InputError | None = None
    try:
        held = without(op, module, entries(op, module), ignore)
        _require_readable(op, held)
    except InputError as error:
        problem = error
    line = open_line(op, group, held)
    alone = line.ranks.size == 1 or problem is not None
    said = {} if alone else {entry.name: facts(entry, values=True) for entry in held}
    text = write(said)
    texts = line.compare(text, lambda: text, problem)
    return [] if texts is None else differences([read(text) for text in texts])


def _require_readable(op: str, held: Sequence[Entry]) -> None:
    for entry in tensors_and_others(held)[0]:
        x = entry.value
        if x.is_meta or is_lazy(x):
            continue  # it has no value, which may be the same on every rank
        if why := hindrance(x, writing=False):
            raise TensorError(
                f"{op}: {entry.name} is {why}.\nName it in ignore, or compare what it is made of."
            )
