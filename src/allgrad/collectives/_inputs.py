"""What every collective does with its arguments: leaves of a nest, checks, and running pairs."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from allgrad._autograd.async_calls import DoneHandle, Handle, start
from allgrad._autograd.transforms import apply, has_only_shape
from allgrad._core import reductions
from allgrad._core.dtensor import is_dtensor
from allgrad._wire import handshake
from allgrad._wire.calls import Call, describe_shapes, shapes_of_graph
from allgrad._wire.consistency import refuse
from allgrad._wire.handshake import RankArgs, TensorSpec
from allgrad.collectives._pair_cache import remember
from allgrad.containers.nests import Frame, split_tensors
from allgrad.errors import GroupError, InputError, ModeError, TensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from allgrad._autograd.adjoint_pair import AdjointPair
    from allgrad._core.partition import Partition
    from allgrad.types import Op

__all__ = [
    "Leaves",
    "arguments_in_words",
    "as_index",
    "as_rank",
    "check_bool",
    "check_for_all",
    "check_grad",
    "check_rank",
    "describe",
    "exchange",
    "has_only_shapes",
    "named",
    "run_known",
    "take_leaves",
]

T = TypeVar("T")


class Leaves:
    """The tensors of a nest, and the nest into which their results go back."""

    __slots__ = ("frame", "tensors")

    def __init__(self, tensors: list[Tensor], frame: Frame | None) -> None:
        """Tensors in the order of the nest; no frame for a single tensor."""
        self.tensors, self.frame = tensors, frame

    def put_back(self, results: Sequence[object]) -> Any:
        """A nest of the same structure with one result for each leaf."""
        return results[0] if self.frame is None else self.frame(results)

    def names(self) -> list[str]:
        """The leaves' names in the nest, for error messages."""
        return [""] if self.frame is None else self.frame.names()

    def along(self, name: str, dim: object) -> tuple[Leaves, tuple[int, ...]]:
        """The leaves, tensors without dimensions as vectors of one, and each one's dim from the front."""
        dims = tuple(_dim_from_front(name, tensor, dim) for tensor in self.tensors)
        if all(tensor.dim() for tensor in self.tensors):
            return self, dims
        vectors = [t if t.dim() else t.reshape(1) for t in self.tensors]
        return Leaves(vectors, self.frame), dims

    def by_dtype(self) -> list[list[int]]:
        """The numbers of leaves that travel together: of one dtype, on one device."""
        together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, tensor in enumerate(self.tensors):
            together.setdefault((tensor.dtype, tensor.device), []).append(i)
        return list(together.values())

    def run(
        self,
        make_pair: Callable[[list[int]], AdjointPair],
        *,
        stop: bool = False,
        async_op: bool = False,
        key: tuple[Any, ...] | None = None,
    ) -> Any:
        """Run one pair for each dtype, made for the numbers of its leaves.

        ``stop`` ends the derivative; ``key`` caches the pair of a single tensor.
        """

        def run_pair(numbers: list[int], xs: list[Tensor]) -> Any:
            pair = make_pair(numbers)
            if key is not None and xs[0] is key[1]:  # not a vector made of a single number
                remember(pair, *key)
            return (start if async_op else apply)(pair, xs, stop=stop)

        return self.call_each(run_pair, async_op=async_op)

    def run_parts(
        self,
        partition: Partition,
        make_pair: Callable[[Partition], AdjointPair],
        *,
        stop: bool = False,
        async_op: bool = False,
        key: tuple[Any, ...] | None = None,
    ) -> Any:
        """The same for pairs that are made for the leaves' part of a partition."""
        whole = self.frame is None
        return self.run(
            lambda numbers: make_pair(partition if whole else partition.select(numbers)),
            stop=stop,
            async_op=async_op,
            key=key,
        )

    def call_each(
        self, call: Callable[[list[int], list[Tensor]], Any], *, async_op: bool = False
    ) -> Any:
        """Call once for each dtype with the leaves and their numbers; put the results back.

        With ``async_op`` the result is a handle of the nest.
        """
        if self.frame is None and not async_op:
            return call([0], self.tensors)[0]
        groups = self.by_dtype()
        made = [call(numbers, [self.tensors[i] for i in numbers]) for numbers in groups]

        def finish() -> Any:
            results: list[Tensor] = list(self.tensors)
            for numbers, done in zip(groups, made, strict=True):
                values = done.wait() if isinstance(done, Handle) else done
                for i, result in zip(numbers, values, strict=True):
                    results[i] = result
            return self.put_back(results)

        if async_op and any(
            isinstance(done, Handle) and not isinstance(done, DoneHandle) for done in made
        ):
            return Handle(finish)
        return DoneHandle(finish()) if async_op else finish()


def run_known(pair: AdjointPair, x: Tensor, grad: str, async_op: bool) -> Any:
    """Run the pair of a call that was made before."""
    stop = grad == "none"
    if not async_op:
        return apply(pair, (x,), stop=stop)[0]
    started = start(pair, (x,), stop=stop)
    if isinstance(started, DoneHandle):
        return DoneHandle(started.wait()[0])
    return Handle(lambda: started.wait()[0])


def named(call: Call, leaves: Leaves) -> Call:
    """The call with the keys of its nest: ranks that have others never meet in it."""
    if leaves.frame is None or call.size == 1:
        return call
    return Call(*call[:-1], leaves.frame.keys())  # half of the time of _replace


def take_leaves(name: str, x: object) -> Leaves:
    """The tensors of a nest; raises for those that cannot travel."""
    if isinstance(x, Tensor):
        _check_tensor(name, x)
        return Leaves([x], None)
    tensors, frame = split_tensors(x)
    if not tensors and frame.structure.num_leaves:
        raise TensorError(
            f"{name}: x is {type(x).__name__}, not a tensor.\nGive every rank a tensor."
        )
    for tensor in tensors:
        _check_tensor(name, tensor)
    return Leaves(tensors, frame)


def describe(x: object, free_dim: int | None = None, /, **given: object) -> str:
    """Arguments, names in a nest, shapes and dtypes in words, as checked mode compares them.

    A free dim is left open.
    """
    before = arguments_in_words(**given) + ", " if given else ""
    if isinstance(x, Tensor):
        tensors = [x]
    else:
        try:
            tensors, frame = split_tensors(x)
        except InputError:
            return before + "?"
        before += ", ".join([*frame.names(), ""])
    if torch.compiler.is_compiling() and any(t.dim() for t in tensors):
        return before + shapes_of_graph(as_constant(free_dim))
    return before + describe_shapes(tensors, free_dim)


def arguments_in_words(**given: object) -> str:
    """Arguments by name."""
    return ", ".join([f"{name}={as_constant(value)}" for name, value in given.items()])


def as_constant(value: object) -> object:
    """Of a number that varies from call to call a constant of the graph: TorchDynamo formats no other
    (test_numbers_that_vary_from_call_to_call).
    """
    if isinstance(value, (list, tuple)):
        return [as_constant(item) for item in value]
    return (
        operator.index(value) if isinstance(value, int) and not isinstance(value, bool) else value
    )


_KNOWN_DTYPES = frozenset(handshake.DTYPES)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _check_tensor(name: str, x: Tensor) -> None:
    plain = type(x) in _PLAIN_TYPES and x.layout is torch.strided
    if plain and x.dtype in _KNOWN_DTYPES and not x.is_nested and x.dim() <= handshake.MAX_DIMS:
        return
    if is_dtensor(x):
        raise TensorError(f"{name}: x is a DTensor.\nGive its local piece, x.to_local().")
    if x.is_nested:
        raise TensorError(
            f"{name}: x is a nested tensor; only dense tensors travel.\n"
            "Give x.values(), and its offsets as a second leaf."
        )
    if x.layout != torch.strided:
        kind = str(x.layout).removeprefix("torch.")
        raise TensorError(f"{name}: x is {kind}; only dense tensors travel.\nGive x.to_dense().")
    if is_lazy(x):
        raise TensorError(
            f"{name}: x is a parameter that has no shape yet.\nRun the lazy module once first."
        )
    if hasattr(x, "trigger_wait"):
        raise TensorError(
            f"{name}: x is still on its way, the result of a functional collective.\nGive x.wait()."
        )
    if not (plain or has_only_shape(x)) and x.numel() and not x.data_ptr():
        raise TensorError(
            f"{name}: x is a {type(x).__name__}, which has no memory of its own.\n"
            "Give the tensors that it is made of."
        )
    if x.is_quantized:
        raise TensorError(f"{name}: x is quantised.\nGive x.dequantize(), or its x.int_repr().")
    if x.dtype not in _KNOWN_DTYPES:
        raise TensorError(f"{name}: {x.dtype} cannot travel.\nView x as another dtype.")
    if x.dim() > handshake.MAX_DIMS:
        raise TensorError(
            f"{name}: x has {x.dim()} dimensions.\nReshape it to at most {handshake.MAX_DIMS}."
        )


def check_grad(call: Call | str, grad: object, *, same: bool = False) -> bool:
    """Raise unless this collective knows that meaning; tell whether the derivative stops.

    A call that sends nothing forward is given by its name: no other rank waits for it.
    """
    known = ("sum", "same", "none") if same else ("sum", "none")
    if grad not in known:
        name = call if isinstance(call, str) else call.name
        error = InputError(f"{name}: there is no grad={grad!r}.\nUse one of {list(known)}.")
        if isinstance(call, str):
            raise error
        refuse(call, error)
    return grad == "none"


def check_bool(call: Call, argument: str, value: object) -> None:
    """Raise unless this is True or False; in checked mode the others raise too."""
    if not isinstance(value, bool):
        problem = (
            f"{call.name}: {argument}={value!r} is neither True nor False.\nGive one of these."
        )
        refuse(call, InputError(problem))


def check_rank(name: str, call: Call, argument: str, rank: object) -> int:
    """Raise unless this is a rank within the group; in checked mode the others raise too."""
    try:
        return as_rank(name, call, argument, rank)
    except GroupError as error:
        refuse(call, error)


def as_rank(name: str, call: Call, argument: str, rank: object) -> int:
    """A rank within the group; raises for anything else, and tells no other rank."""
    value = as_index(rank)
    if value is None or not 0 <= value < call.size:
        raise GroupError(
            f"{name}: {argument}={rank!r} is not a rank of this group of {call.size}.\n"
            f"Give the rank within the group, 0 to {call.size - 1}."
        )
    return value


def as_index(value: object) -> int | None:
    """A whole number, or None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value  # in a graph it stays symbolic
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _dim_from_front(name: str, x: Tensor, dim: object) -> int:
    value, dims = as_index(dim), max(x.dim(), 1)
    if value is None or not -dims <= value < dims:
        raise InputError(
            f"{name}: dim={dim!r} is out of range for shape {tuple(x.shape)}.\n"
            f"Give a dim from {-dims} to {dims - 1}."
        )
    return value % dims


def check_for_all(
    call: Call, operation: str, x: object, check: Callable[[], T], *, exchanged: bool
) -> T:
    """Check this rank's arguments before the ranks exchange theirs.

    A mistake is told to all ranks in that exchange, and raised on every one. Where nothing is
    exchanged it is raised here alone; in checked mode the others, who come to this call, raise too.
    """
    try:
        return check()
    except InputError as error:
        if torch.compiler.is_compiling():
            raise
        if not exchanged:
            refuse(call, error)
        problem = error
    specs: tuple[TensorSpec, ...] = ()
    device = torch.get_default_device()
    if isinstance(x, Tensor):
        device = x.device
        if not (x.is_nested or is_lazy(x)) and x.dim() <= handshake.MAX_DIMS:
            dtype = x.dtype if x.dtype in _KNOWN_DTYPES else None
            specs = (TensorSpec(dtype, tuple(x.shape), 0),)
    rows = handshake.exchange(call, RankArgs(operation, specs, problem=problem), device)
    rows.decoded()  # raises
    raise problem


def take_reduced(call: Call, x: object, op: Op) -> tuple[Leaves, list[reductions.Reduction]]:
    """The tensors of a nest, and the reduction of each; raises for those that have none."""

    def check() -> tuple[Leaves, list[reductions.Reduction]]:
        leaves = take_leaves(call.name, x)
        return leaves, [reductions.find(call.name, op, t.dtype) for t in leaves.tensors]

    return check_for_all(call, call.name, x, check, exchanged=False)


def exchange(  # noqa: PLR0917
    call: Call,
    operation: str,
    leaves: Leaves,
    dims: Sequence[int],
    amounts: Sequence[Sequence[int]] | None = None,
    root: int = -1,
) -> handshake.Exchange:
    """Tell all ranks what this one holds, and learn what they hold."""
    if torch.compiler.is_compiling() or has_only_shapes(leaves):
        raise ModeError(
            f"{call.name}: with shapes alone the ranks cannot tell each other their sizes.\n"
            f"{_ADVICE.get(operation, _ADVICE['all_gather'])}"
        )
    specs = tuple(
        TensorSpec(t.dtype, tuple(t.shape), dim)
        for t, dim in zip(leaves.tensors, dims, strict=True)
    )
    names = 0 if leaves.frame is None else handshake.hash_names(leaves.names())
    device = leaves.tensors[0].device if leaves.tensors else torch.get_default_device()
    kind = device.type if leaves.tensors else ""
    mine = RankArgs(operation, specs, names, root, device=kind)
    return handshake.exchange(call, mine, device, amounts)


_ADVICE = {
    "all_gather": 'Give sizes=, what each rank holds; or sizes="equal" where all pieces have one.',
    "all_to_all": 'Give recv_sizes=, what each rank sends to this one; or send_sizes="equal".',
    "scatter": "Give sizes= on every rank, and off src a tensor that is empty along dim.",
    "gather_sizes": "Call it before, and pass the sizes in.",
}


def has_only_shapes(leaves: Leaves) -> bool:
    """Tell whether no message can be sent about the leaves: they are fake or meta."""
    return not torch.compiler.is_compiling() and any(has_only_shape(t) for t in leaves.tensors)
