"""The entries of a state, by name: tensors and settings of a module, an optimizer or a dict.

module      fc.weight, fc.bias, norm.running_mean      as ``state_dict`` names them
optimizer   state[0]['exp_avg'], param_groups[0]['lr'] as its ``state_dict()`` is indexed
dict        its keys
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from allgrad.containers.nests import flatten, unflatten
from allgrad.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Entry",
    "Kind",
    "Setting",
    "State",
    "assign_settings",
    "drop_ignored",
    "entries",
    "is_numpy_number",
    "tensors_and_others",
]

State: TypeAlias = nn.Module | Optimizer | Mapping[str, Any]
Setting: TypeAlias = int | float | bool | str | np.generic | None
Kind: TypeAlias = Literal["parameter", "buffer", "tensor", "setting", "object"]


class Entry(NamedTuple):
    """A name and the value that this rank holds under it.

    A tensor that also has an earlier name is ``tied`` to that name, and is read and written there.
    """

    name: str
    kind: Kind
    value: Any
    tied: str = ""


def entries(caller: str, state: State) -> list[Entry]:
    """List the entries sorted by name: the order on every rank, however the state was built."""
    if isinstance(state, nn.Module):
        _require_whole(caller, state)
        return _by_name(_of_module(state))
    if isinstance(state, Optimizer):
        return _by_name(_of_optimizer(state))
    if isinstance(state, Mapping):
        if unnamed := [key for key in state if not isinstance(key, str)]:
            raise InputError(
                f"{caller}: the keys of a dict of tensors must be strings, not {unnamed[0]!r}.\n"
                "Give {name: tensor}."
            )
        for name, value in state.items():
            if isinstance(value, (Mapping, list, tuple, nn.Module, Optimizer)):
                raise InputError(
                    f"{caller}: {name!r} is a {type(value).__name__}, whose tensors would be left out.\n"
                    f"Call it for state[{name!r}] by itself, or give one dict of tensors by name."
                )
        return _by_name(_entry(name, value) for name, value in state.items())
    raise InputError(
        f"{caller}: {type(state).__name__} is not a state.\n"
        "Give a torch.nn.Module, a torch.optim.Optimizer, or a dict of tensors by name."
    )


def _require_whole(caller: str, module: nn.Module) -> None:
    for path, part in module.named_modules():
        names = {base.__name__ for base in type(part).__mro__}
        if "FullyShardedDataParallel" in names:
            strategy = getattr(getattr(part, "sharding_strategy", None), "name", "")
            if strategy != "NO_SHARD":
                raise InputError(
                    f"{caller}: {path or type(module).__name__} is sharded by FSDP1: each rank holds another "
                    "piece under the same name.\nCall it before the model is wrapped, or use FSDP2."
                )


def tensors_and_others(held: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Separate the entries that hold tensors from those that hold settings and objects."""
    others = [entry for entry in held if entry.kind in {"setting", "object"}]
    if not others:
        return list(held), others
    return [entry for entry in held if entry.kind not in {"setting", "object"}], others


def drop_ignored(
    caller: str, state: State, found: Sequence[Entry], ignore: Iterable[str]
) -> list[Entry]:
    """Leave out the entries that ``ignore`` names; mark the remaining tied tensors.

    A name is that of an entry, or of everything below it: a submodule, the state of a parameter.
    """
    if isinstance(ignore, str):
        raise InputError(
            f"{caller}: ignore={ignore!r} is a single string.\nGive a list, [{ignore!r}]."
        )
    names = set(_strings(caller, ignore))
    if not names and len({id(entry.value) for entry in found}) == len(found):
        return list(found)
    modules = dict(state.named_modules()).keys() if isinstance(state, nn.Module) else set()
    used: set[str] = set()
    first: dict[int, str] = {}
    kept = []
    for entry in found:
        matching = names.intersection(_prefixes(entry.name)) if names else names
        used |= matching
        if not matching:
            tied = first.setdefault(id(entry.value), entry.name)
            is_tied = isinstance(entry.value, Tensor) and tied != entry.name
            kept.append(Entry(entry.name, entry.kind, entry.value, tied) if is_tied else entry)
    if unknown := sorted(names - used - modules):
        raise InputError(
            f"{caller}: ignore names nothing in this {type(state).__name__}: {', '.join(unknown)}.\n"
            "Give names of parameters, buffers or submodules, as named_parameters() shows them."
        )
    return kept


def _strings(caller: str, ignore: object) -> list[str]:
    names = (
        list(ignore) if isinstance(ignore, Iterable) and not isinstance(ignore, bytes) else [ignore]
    )
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise InputError(f"{caller}: ignore holds {wrong[0]!r}.\nGive a list of names.")
    return names  # type: ignore[return-value]


def assign_settings(optimizer: Optimizer, values: Mapping[str, Setting]) -> None:
    """Assign settings by the names of :func:`entries`; containers keep their types."""
    for part in (*_states(optimizer), *_groups(optimizer)):
        if not values.keys().isdisjoint(part.names):
            pairs = zip(part.names, part.leaves, strict=True)
            new = [values.get(name, leaf) for name, leaf in pairs]
            part.owner.update(unflatten(part.structure, new))


def _by_name(found: Iterable[Entry]) -> list[Entry]:
    return sorted(found, key=itemgetter(0))


def _of_module(module: nn.Module) -> Iterator[Entry]:
    # named_parameters() is slower: it looks up every tensor to find duplicates.
    kinds: tuple[tuple[Kind, str], ...] = (("parameter", "_parameters"), ("buffer", "_buffers"))
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for kind, where in kinds:
            for name, value in getattr(part, where).items():
                if value is not None:
                    yield Entry(prefix + name, kind, value)


def is_numpy_number(value: object) -> bool:
    """Whether this is a boolean, integer or floating-point number of NumPy that a Python number equals."""
    return isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.itemsize <= 8


def _entry(name: str, value: object) -> Entry:
    if isinstance(value, Tensor):
        return Entry(name, "tensor", value)
    is_plain = isinstance(value, (int, float, str)) and not isinstance(value, enum.Enum)
    if value is None or is_plain or is_numpy_number(value):
        return Entry(name, "setting", value)
    return Entry(name, "object", value)


class _Dict:
    """One flattened dict of an optimizer: the state of a parameter, or the settings of a group."""

    def __init__(self, name: str, owner: dict[str, Any], *, leave_out: str | None = None) -> None:
        self.owner = owner
        kept = {key: value for key, value in owner.items() if key != leave_out}
        self.leaves, self.structure = flatten(kept)
        self.names = [str(accessor.codify(name)) for accessor in self.structure.accessors()]


def _states(optimizer: Optimizer) -> Iterator[_Dict]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        if parameter in optimizer.state:  # a defaultdict: indexing would add an entry
            yield _Dict(f"state[{number}]", optimizer.state[parameter])


def _groups(optimizer: Optimizer) -> Iterator[_Dict]:
    for number, group in enumerate(optimizer.param_groups):
        yield _Dict(f"param_groups[{number}]", group, leave_out="params")


def _of_optimizer(optimizer: Optimizer) -> Iterator[Entry]:
    for part in (*_states(optimizer), *_groups(optimizer)):
        for name, leaf in zip(part.names, part.leaves, strict=True):
            yield _entry(name, leaf)
    for number, group in enumerate(optimizer.param_groups):
        # The parameters belong to the module; here only their number is compared.
        yield Entry(f"param_groups[{number}]['params']", "object", group["params"])


def _prefixes(name: str) -> Iterator[str]:
    """The name itself and the names above it: a.b.c, a, a.b, or state[0]['x'], state, state[0]."""
    yield name
    for position, letter in enumerate(name):
        if letter in ".[" and position:
            yield name[:position]
