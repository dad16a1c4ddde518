"""What callers pass, checked: tensors, dimensions, ranks, and sizes given or found."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from allgrad import agreement
from allgrad.agreement import Announcement
from allgrad.errors import GroupError, InputError, SizesError, TensorError
from allgrad.ragged import even

if TYPE_CHECKING:
    from collections.abc import Callable

    from allgrad.wire import Group

__all__ = [
    "Grad",
    "Sizes",
    "announce",
    "attempt",
    "check_grad",
    "check_rank",
    "check_tensor",
    "dim_from_front",
    "given_sizes",
    "held",
    "pieces",
    "require_fit",
    "shares",
    "vector_at_least",
]

T = TypeVar("T")

Grad: TypeAlias = Literal["sum", "same", "none"]
Sizes: TypeAlias = Sequence[int] | Literal["equal"] | None


def check_tensor(op: str, x: object) -> Tensor:
    """Let through what can travel: a dense tensor."""
    if not isinstance(x, Tensor):
        raise TensorError(
            f"{op}: x is {type(x).__name__}, not a tensor.\nGive every rank a tensor."
        )
    if hasattr(x, "device_mesh"):
        raise TensorError(f"{op}: x is a DTensor.\nGive its local piece, x.to_local().")
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TensorError(f"{op}: x is {kind}; only dense tensors travel.\nGive x.to_dense().")
    if x.is_quantized:
        raise TensorError(f"{op}: x is quantised.\nGive x.dequantize(), or its x.int_repr().")
    if x.dtype not in agreement.DTYPES:
        raise TensorError(f"{op}: no rank knows what {x.dtype} means.\nView x as another dtype.")
    if x.dim() > agreement.MAX_DIMS:
        raise TensorError(
            f"{op}: x has {x.dim()} dimensions.\nReshape it to at most {agreement.MAX_DIMS}."
        )
    return x


def check_grad(op: str, grad: object, known: Sequence[str] = ("sum", "same", "none")) -> None:
    if grad not in known:
        raise InputError(f"{op}: there is no grad={grad!r}.\nUse one of {list(known)}.")


def check_rank(op: str, group: Group, name: str, rank: object) -> int:
    """Let through a rank within the group."""
    value = _index(rank)
    if value is None or not 0 <= value < group.size:
        raise GroupError(
            f"{op}: {name}={rank!r} is not a rank of this group of {group.size}.\n"
            f"Give the rank within the group, 0 to {group.size - 1}."
        )
    return value


def dim_from_front(op: str, x: Tensor, dim: object) -> int:
    """Count ``dim`` from the front; a tensor without dimensions counts as a vector of one."""
    value, dims = _index(dim), max(x.dim(), 1)
    if value is None or not -dims <= value < dims:
        raise InputError(
            f"{op}: dim={dim!r} is out of range for shape {tuple(x.shape)}.\n"
            f"Give a dim from {-dims} to {dims - 1}."
        )
    return value % dims


def given_sizes(op: str, group: Group, sizes: Sizes, name: str = "sizes") -> tuple[int, ...]:
    """Let through sizes by rank: one whole number from 0 up for each."""
    assert sizes is not None
    values = None if isinstance(sizes, str) else [_index(size) for size in sizes]
    if values is None:
        raise SizesError(f'{op}: {name}={sizes!r}.\nGive None, "equal", or one size for each rank.')
    if len(values) != group.size:
        raise SizesError(
            f"{op}: {name} has {len(values)} entries for a group of {group.size} ranks.\n"
            "Give one size for each rank, in rank order."
        )
    whole = tuple(value for value in values if value is not None and value >= 0)
    if len(whole) != len(values):
        raise SizesError(f"{op}: {name}={list(sizes)}.\nSizes are whole numbers from 0 up.")
    return whole


def shares(
    op: str, group: Group, length: int, sizes: Sizes, name: str = "sizes"
) -> tuple[int, ...]:
    """How a length that this rank holds is cut for the ranks."""
    if sizes is None:
        return even(length, group.size)
    if isinstance(sizes, str) and sizes == "equal":
        if length % group.size:
            raise SizesError(
                f'{op}: {name}="equal", but {length} does not divide by {group.size} ranks.\n'
                "Leave it out for shares as even as possible, or give one size for each rank."
            )
        return (length // group.size,) * group.size
    values = given_sizes(op, group, sizes, name)
    if sum(values) != length:
        raise SizesError(
            f"{op}: {name}={list(values)} add up to {sum(values)}, but x has {length} there.\n"
            "Give sizes that add up to x's length along dim."
        )
    return values


def held(op: str, group: Group, length: int, sizes: Sizes) -> tuple[int, ...] | None:
    """What each rank holds, as far as the caller says; ``None`` when that must be found out."""
    if sizes is None:
        return (length,) if group.size == 1 else None
    if isinstance(sizes, str) and sizes == "equal":
        return (length,) * group.size
    values = given_sizes(op, group, sizes)
    if values[group.rank] != length:
        raise SizesError(
            f"{op}: sizes={list(values)} say that rank {group.rank} holds {values[group.rank]}, "
            f"but it holds {length}.\nGive what each rank holds along dim, in rank order."
        )
    return values


def pieces(
    op: str, group: Group, x: object, dim: object, sizes: Sizes
) -> tuple[Tensor, int, tuple[int, ...]]:
    """Check a piece of a ragged whole: the tensor, dim from the front, what each rank holds.

    With ``sizes=None`` a mistake on one rank is told to all of them in the size exchange.
    """

    def check() -> tuple[Tensor, int, tuple[int, ...] | None]:
        tensor, axis = vector_at_least(op, x, dim)
        return tensor, axis, held(op, group, tensor.shape[axis], sizes)

    checked = attempt(check, others_wait=sizes is None and group.size > 1)
    if not isinstance(checked, InputError) and checked[2] is not None:
        return checked[0], checked[1], checked[2]
    heard = announce(op, group, x, checked if isinstance(checked, InputError) else checked[1])
    assert not isinstance(checked, InputError)
    tensor, axis, _ = checked
    require_fit(op, heard, axis)
    return tensor, axis, tuple(a.shape[axis] for a in heard)


def vector_at_least(op: str, x: object, dim: object) -> tuple[Tensor, int]:
    """Check a tensor and its dim; one without dimensions becomes a vector of one."""
    tensor = check_tensor(op, x)
    axis = dim_from_front(op, tensor, dim)
    return (tensor if tensor.dim() else tensor.reshape(1)), axis


def attempt(check: Callable[[], T], *, others_wait: bool) -> T | InputError:
    """Check this rank's arguments; hand the error back when other ranks wait to hear of it."""
    try:
        return check()
    except InputError as error:
        if not others_wait:
            raise
        return error


def announce(
    op: str,
    group: Group,
    x: object,
    dim: int | InputError,
    counts: Sequence[int] | None = None,
) -> list[Announcement]:
    """Tell all ranks what this one brings, or its problem; raise if any of them has one."""
    shown = x if isinstance(x, Tensor) and x.dim() <= agreement.MAX_DIMS else None
    device = torch.get_default_device() if shown is None else shown.device
    shape = () if shown is None else tuple(shown.shape) or (1,)
    dtype = shown.dtype if shown is not None and shown.dtype in agreement.DTYPES else None
    if isinstance(dim, InputError):
        mine = Announcement(op, dtype, shape, 0, problem=dim)
    else:
        mine = Announcement(op, dtype, shape, dim)
    return agreement.exchange(group, mine, device, counts)


def require_fit(op: str, heard: Sequence[Announcement], free_dim: int | None) -> None:
    """Raise on every rank unless all pieces agree in everything but their length in one dim."""
    rule = f"pieces may differ along dim {free_dim} only" if free_dim is not None else "all alike"
    agreement.require_alike(
        heard,
        lambda a: a.op,
        f"{op}: the ranks called different collectives.",
        lambda a, _: f"called {a.op}",
        "Call the same collectives in the same order on every rank.",
    )
    agreement.require_alike(
        heard,
        lambda a: a.dtype,
        f"{op}: pieces have one dtype.",
        lambda _, usual: f"not {str(usual.dtype).removeprefix('torch.')}",
        "Cast the pieces to one dtype before the call.",
    )
    agreement.require_alike(
        heard,
        lambda a: len(a.shape),
        f"{op}: pieces have one number of dimensions.",
        lambda a, usual: f"{len(a.shape)} dimensions, not {len(usual.shape)}",
        "Reshape the pieces before the call.",
    )
    if free_dim is not None:
        agreement.require_alike(
            heard,
            lambda a: a.dim,
            f"{op}: the ranks name one dim.",
            lambda a, usual: f"dim {a.dim}, not {usual.dim}",
            "Give every rank the same dim.",
            row=lambda a: f"{agreement.describe(a)}, dim {a.dim}",
        )
    for other in range(len(heard[0].shape)):
        if other == free_dim:
            continue
        agreement.require_alike(
            heard,
            operator.attrgetter("shape") if free_dim is None else lambda a, d=other: a.shape[d],  # type: ignore[misc]
            f"{op}: {rule}.",
            lambda _, __, d=other: f"differs in dim {d}",  # type: ignore[misc]
            f"Give every rank the same length in dim {other} before the call.",
        )


def _index(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
