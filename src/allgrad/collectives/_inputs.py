"""What callers pass, checked: nests of tensors, dimensions, ranks, and sizes given or found."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from allgrad._autograd.async_calls import Handle, Landed, start
from allgrad._autograd.transforms import apply, has_no_memory
from allgrad._core.partition import even
from allgrad._core.torch_internals import lengths_differ
from allgrad._wire import handshake as agreement
from allgrad._wire.groups import shape_text, shapes_in_graph
from allgrad._wire.handshake import Announcement, Brought
from allgrad.containers.nests import Frame, split_tensors
from allgrad.errors import GroupError, InputError, ModeError, SizesError, TensorError

if TYPE_CHECKING:
    from allgrad._wire.primitives import Group

__all__ = [
    "Grad",
    "Nest",
    "Sizes",
    "Taken",
    "announce",
    "attempt",
    "check_grad",
    "check_rank",
    "exchange",
    "given_sizes",
    "held_sizes",
    "only_shapes",
    "require_fit",
    "shapes",
    "shares",
    "take",
    "way_to_run",
]

Grad: TypeAlias = Literal["sum", "same", "none"]
Sizes: TypeAlias = Sequence[int] | Literal["equal"] | None
Nest = TypeVar("Nest")
T = TypeVar("T")
Started: TypeAlias = Handle[tuple[Tensor, ...]]


class Taken(NamedTuple, Generic[Nest]):
    """The tensors of a nest, and the nest to put their results into."""

    tensors: list[Tensor]
    frame: Frame | None

    def put_back(self, results: Sequence[object]) -> Any:
        return results[0] if self.frame is None else self.frame(results)

    def names(self) -> list[str]:
        return [""] if self.frame is None else self.frame.names()

    def dims(self, op: str, dim: object) -> tuple[int, ...]:
        """The dim of each tensor, counted from the front."""
        return tuple(_dim_from_front(op, tensor, dim) for tensor in self.tensors)

    def at_least_vectors(self) -> Taken[Nest]:
        """A tensor without dimensions becomes a vector of one."""
        vectors = [tensor if tensor.dim() else tensor.reshape(1) for tensor in self.tensors]
        return Taken(vectors, self.frame)

    def by_dtype(self) -> list[list[int]]:
        """Which tensors travel together: those of one dtype, on one device."""
        if len(self.tensors) == 1:
            return [[0]]
        together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, tensor in enumerate(self.tensors):
            together.setdefault((tensor.dtype, tensor.device), []).append(i)
        return list(together.values())

    def run(
        self,
        call: Callable[[list[int], list[Tensor]], Sequence[Tensor] | Started],
        *,
        async_op: bool = False,
    ) -> Nest:
        """Call once for each dtype, with the tensors' numbers and the tensors; put back the results.

        With ``async_op`` what comes back is a handle of the nest.
        """
        if self.frame is None and not async_op:
            return cast("Nest", call([0], self.tensors)[0])  # type: ignore[index]
        groups = self.by_dtype()
        made = [call(numbers, [self.tensors[i] for i in numbers]) for numbers in groups]

        def put_back() -> Nest:
            results: list[Tensor] = list(self.tensors)
            for numbers, done in zip(groups, made, strict=True):
                landed = done.wait() if isinstance(done, Handle) else done
                for i, result in zip(numbers, landed, strict=True):
                    results[i] = result
            return cast("Nest", self.put_back(results))

        if any(isinstance(done, Handle) and not isinstance(done, Landed) for done in made):
            return cast("Nest", Handle(put_back))
        return cast("Nest", Landed(put_back())) if async_op else put_back()


def way_to_run(async_op: bool) -> Callable[..., Any]:
    """How a pair is run: to its end, or started only."""
    return start if async_op else apply


def shapes(x: object, free_dim: int | None = None) -> str:
    """Shapes and dtypes in words, as they must be alike on every rank: a free dim is left open."""
    try:
        tensors = [x] if isinstance(x, Tensor) else split_tensors(x)[0]
    except InputError:
        return "?"
    if torch.compiler.is_compiling() and any(t.dim() for t in tensors):
        return shapes_in_graph(free_dim)
    return shape_text(tensors, free_dim)


def take(op: str, x: Nest) -> Taken[Nest]:
    """Take the tensors out of a nest, and let through only what can travel."""
    if isinstance(x, Tensor):
        _check_tensor(op, x)
        return Taken([x], None)
    tensors, frame = split_tensors(x)
    if not tensors and frame.structure.num_leaves:
        raise TensorError(
            f"{op}: x is {type(x).__name__}, not a tensor.\nGive every rank a tensor."
        )
    for tensor in tensors:
        _check_tensor(op, tensor)
    return Taken(tensors, frame)


_USUAL = frozenset(agreement.DTYPES)


def _check_tensor(op: str, x: Tensor) -> None:
    plain = type(x) in {Tensor, torch.nn.Parameter} and x.layout is torch.strided
    if plain and x.dtype in _USUAL and not x.is_nested and x.dim() <= agreement.MAX_DIMS:
        return
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


def check_grad(op: str, grad: object) -> None:
    """Let through a known meaning of the gradient."""
    known = ("sum", "same", "none")
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


def _dim_from_front(op: str, x: Tensor, dim: object) -> int:
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
    if isinstance(sizes, str):
        raise SizesError(f'{op}: {name}={sizes!r}.\nGive None, "equal", or one size for each rank.')
    values = [_index(size) for size in sizes]
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
    if lengths_differ(sum(values), length):
        raise SizesError(
            f"{op}: {name}={list(values)} add up to {sum(values)}, but x has {length} there.\n"
            "Give sizes that add up to x's length along dim."
        )
    return values


def held_sizes(op: str, group: Group, length: int, sizes: Sizes) -> tuple[int, ...]:
    """What each rank holds, as the caller says."""
    if isinstance(sizes, str) and sizes == "equal":
        return (length,) * group.size
    values = given_sizes(op, group, sizes)
    if lengths_differ(values[group.rank], length):
        raise SizesError(
            f"{op}: sizes={list(values)} say that rank {group.rank} holds {values[group.rank]}, "
            f"but it holds {length}.\nGive what each rank holds along dim, in rank order."
        )
    return values


def attempt(check: Callable[[], T], *, others_wait: bool) -> T | InputError:
    """Check this rank's arguments; hand the error back when other ranks wait to hear of it."""
    try:
        return check()
    except InputError as error:
        if not others_wait or torch.compiler.is_compiling():
            raise
        return error


def exchange(
    op: str,
    group: Group,
    taken: Taken[Any],
    dims: Sequence[int],
    counts: Sequence[Sequence[int]] | None = None,
) -> list[Announcement]:
    """Tell all ranks what this one brings; raise if any of them has a problem with its own."""
    if only_shapes(taken):
        raise ModeError(
            f"{op}: of fake and meta tensors the ranks cannot tell each other the sizes.\n"
            f"{_ADVICE.get(op, _ADVICE['all_gather'])}"
        )
    brought = tuple(
        Brought(t.dtype, tuple(t.shape), dim) for t, dim in zip(taken.tensors, dims, strict=True)
    )
    names = 0 if taken.frame is None else agreement.hash_names(taken.names())
    device = taken.tensors[0].device if taken.tensors else torch.get_default_device()
    return agreement.exchange(group, Announcement(op, brought, names), device, counts)


_ADVICE = {
    "all_gather": 'Give sizes=, what each rank holds; or sizes="equal" where all pieces have one.',
    "all_to_all": 'Give recv_sizes=, what each rank sends to this one; or send_sizes="equal".',
    "scatter": "Give sizes= on every rank, and off src a tensor that is empty along dim.",
    "sizes": "Call it before, and pass the sizes in.",
}


def only_shapes(taken: Taken[Any]) -> bool:
    """Tell whether no message can be sent about the call before it: its tensors are fake or meta."""
    return any(has_no_memory(t) for t in taken.tensors)


def announce(op: str, group: Group, x: object, problem: InputError) -> InputError:
    """Tell all ranks of this one's problem; what comes back is raised everywhere."""
    brought: tuple[Brought, ...] = ()
    device = torch.get_default_device()
    if isinstance(x, Tensor):
        device = x.device
        if x.dim() <= agreement.MAX_DIMS:
            dtype = x.dtype if x.dtype in agreement.DTYPES else None
            brought = (Brought(dtype, tuple(x.shape), 0),)
    try:
        agreement.exchange(group, Announcement(op, brought, problem=problem), device)
    except InputError as told:
        return told
    return problem


def require_fit(op: str, taken: Taken[Any], heard: Sequence[Announcement], *, free: bool) -> None:
    """Raise on every rank unless the pieces agree in everything but, if free, their length in dim."""
    rows = [", ".join(str(b) for b in a.tensors[:3]) or "no tensor" for a in heard]
    agreement.require_alike(
        [a.op for a in heard],
        rows,
        f"{op}: the ranks called different collectives.",
        lambda odd, _: f"called {heard[odd].op}",
        "Call the same collectives in the same order on every rank.",
    )
    agreement.require_alike(
        [(len(a.tensors), a.names) for a in heard],
        [f"{len(a.tensors)} tensors" for a in heard],
        f"{op}: the ranks bring nests of one structure.",
        lambda _, __: "another structure",
        "Give every rank the same containers, keys and lengths, with tensors in the same places.",
    )
    for i, name in enumerate(taken.names()):
        _require_one_fits(
            f"{op}: {name}: " if name else f"{op}: ", [a.tensors[i] for a in heard], free
        )


def _require_one_fits(op: str, heard: list[Brought], free: bool) -> None:
    rows = [str(b) for b in heard]
    agreement.require_alike(
        [b.dtype for b in heard],
        rows,
        f"{op}pieces have one dtype.",
        lambda _, usual: f"not {str(heard[usual].dtype).removeprefix('torch.')}",
        "Cast the pieces to one dtype before the call.",
    )
    agreement.require_alike(
        [len(b.shape) for b in heard],
        rows,
        f"{op}pieces have one number of dimensions.",
        lambda odd, usual: f"{len(heard[odd].shape)} dimensions, not {len(heard[usual].shape)}",
        "Reshape the pieces before the call.",
    )
    agreement.require_alike(
        [b.dim for b in heard],
        [f"{b}, dim {b.dim}" for b in heard],
        f"{op}the ranks name one dim.",
        lambda odd, usual: f"dim {heard[odd].dim}, not {heard[usual].dim}",
        "Give every rank the same dim.",
    )
    free_dim = heard[0].dim if free else -1
    rule = f"pieces may differ along dim {free_dim} only" if free else "all ranks have one shape"
    for other in range(len(heard[0].shape)):
        if other != free_dim:
            agreement.require_alike(
                [b.shape[other] for b in heard],
                rows,
                f"{op}{rule}.",
                lambda _, __, d=other: f"differs in dim {d}",  # type: ignore[misc]
                f"Give every rank the same length in dim {other} before the call.",
            )


def _index(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value  # a compiler keeps it symbolic
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
