"""``compare`` and ``verify``: where the ranks' states differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from allgrad.errors import InputError, TensorError
from allgrad.module_state._differences import Difference, differences, mismatch
from allgrad.module_state._entries import Entry, State, drop_ignored, entries, tensors_and_others
from allgrad.module_state._exchange import StateExchange
from allgrad.module_state._in_eager import in_eager
from allgrad.module_state._specs import entry_spec, why_unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from allgrad._wire.primitives import GroupLike

__all__ = ["compare", "verify"]


@in_eager
def compare(
    module: State, *, group: GroupLike = None, ignore: Iterable[str] = ()
) -> list[Difference]:
    """Return, on every rank, where the states of the ranks differ and what each rank has.

        rank 0   weight A  bias a              [weight: rank 2 has another value,
        rank 1   weight A  bias a     --->      bias: missing on rank 1]
        rank 2   weight B  bias a              the same list on every rank

    Compared are names, kinds, dtypes, shapes, ties and values, in this order; the first difference
    is reported. Values are compared bit for bit, by a 128-bit hash of the elements: -0.0 differs
    from 0.0, a NaN equals a NaN of the same bits, strides and devices are ignored. A meta tensor
    has no value; a tensor whose memory was freed raises. Ranks may hold different names.

    ``module`` may also be an optimizer, whose settings are compared too (None, strings, and
    integers, floating-point numbers and booleans of Python and NumPy by value, other objects by
    type and length), or a dict of tensors by name.

    Cost: reading all values, and one message of 56 bytes from each rank if all states are equal.
    Otherwise the ranks also exchange names and hashes, never the values.
    """
    return _differences("compare", module, group, ignore)


@in_eager
def verify(module: State, *, group: GroupLike = None, ignore: Iterable[str] = ()) -> None:
    """Raise ``StateMismatch`` on every rank unless :func:`compare` finds no difference.

    verify: every rank must hold the same state; 1 differs:
    fc.weight
      rank 0: (2, 8) float32 #5a2f0c8814b9
      rank 1: (2, 8) float32 #5a2f0c8814b9
      rank 2: (2, 8) float32 #e07b33911c52   <- another value
    Call allgrad.module_state.sync to give every rank the state of one of them.

    Where more than values differ, ``sync`` would raise too: build the same state on every rank.
    """
    if found := _differences("verify", module, group, ignore):
        raise mismatch(
            "verify: every rank must hold the same state",
            found,
            "Call allgrad.module_state.sync to give every rank the state of one of them."
            if all(difference.what == "value" for difference in found)
            else "Build the same state on every rank, or name what differs in ignore.",
        )


def _differences(
    caller: str, module: State, group: GroupLike, ignore: Iterable[str]
) -> list[Difference]:
    held: list[Entry] = []
    problem: InputError | None = None
    try:
        held = drop_ignored(caller, module, entries(caller, module), ignore)
        _require_readable(caller, held)
    except InputError as error:
        problem = error
    exchange = StateExchange.open(caller, group, held)
    skip = exchange.call.size == 1 or problem is not None
    specs = {} if skip else {entry.name: entry_spec(entry, values=True) for entry in held}
    summary = repr([(name, *spec) for name, spec in specs.items()])
    by_rank = exchange.compare(summary, lambda: specs, problem)
    return [] if by_rank is None else differences(by_rank)


def _require_readable(caller: str, held: Sequence[Entry]) -> None:
    for entry in tensors_and_others(held)[0]:
        x = entry.value
        if x.is_meta or is_lazy(x):
            continue  # it has no value to compare
        if reason := why_unreadable(x, writing=False):
            raise TensorError(
                f"{caller}: {entry.name} is {reason}.\n"
                "Name it in ignore, or compare the tensors that it is made of."
            )
