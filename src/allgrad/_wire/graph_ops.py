"""The wire inside a graph: functional ops, which compilers see and schedule.

``torch.compile`` traces through the collectives down to here. The ops also know the shapes of
their results without moving anything, so that fake tensors take this way too. Nothing is moved as
bytes and no way is picked by size: both would hide from the compiler what it could schedule.

Each op is a name of our own for torch's ``_c10d_functional`` op and its wait, into which it
dissolves when a graph is lowered. The name carries a batching rule and a derivative, of any order:
torch's own ops have neither, and what they give under ``vmap`` and in a second backward is silently
wrong (test_every_mode_is_exact_or_refused).
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from allgrad._core.partition import linked_zeros

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "broadcast_once",
    "gather_once",
    "in_graph",
    "keep_block",
    "keep_on",
    "only_shapes",
    "reduce",
    "reduce_scatter",
    "share",
    "sum_once",
]

# torch keeps compiled graphs on disk, backward included, and finds them by the names of their ops.
# Ops with other rules than a graph was made with must have other names than it knows.
_NAMESPACE = f"allgrad_{blake2b(Path(__file__).read_bytes(), digest_size=4).hexdigest()}"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_C10D = torch.ops._c10d_functional  # noqa: SLF001
_OPS = getattr(torch.ops, _NAMESPACE)

# As in transforms.py: a result requires grad on every rank, for backward needs everyone.
_ANCHOR = torch.empty(0, requires_grad=True)


def in_graph(x: Tensor) -> bool:
    """Tell whether the call is being traced, or made with a tensor that only has a shape."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def only_shapes(x: Tensor) -> bool:
    """Tell whether no message can be sent now: the tensors have shapes, and perhaps no values."""
    return in_graph(x) or x.is_meta


def all_reduce(x: Tensor, name: str) -> Tensor:
    """Sum over ranks, on every rank."""
    return _as_real(x, lambda t, _: _OPS.all_reduce(t, _ANCHOR, name))


def broadcast(x: Tensor, src: int, name: str) -> Tensor:
    """What ``src`` holds, on every rank."""
    return _as_real(x, lambda t, _: _OPS.broadcast(t, _ANCHOR, src, name))


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], name: str) -> Tensor:
    """Block ``r`` of ``x`` to rank ``r``; the blocks received, in rank order."""
    return _as_real(
        x,
        lambda t, width: _OPS.all_to_all(
            t, _ANCHOR, [n * width for n in receive], [n * width for n in send], name
        ),
    )


def all_gather(x: Tensor, counts: Sequence[int], name: str) -> Tensor:
    """Every rank's block, in rank order, on every rank; by a copy for each if they differ."""
    world = len(counts)
    if all(count == counts[0] for count in counts):
        return _as_real(x, lambda t, _: _OPS.all_gather(t, _ANCHOR, world, name))
    return all_to_all(x.repeat(world), [x.shape[0]] * world, counts, name)


def reduce_scatter(x: Tensor, counts: Sequence[int], rank: int, name: str) -> Tensor:
    """Block ``r`` of ``x``, summed over ranks, on rank ``r``."""
    world = len(counts)
    if all(count == counts[0] for count in counts):
        return _as_real(x, lambda t, _: _OPS.reduce_scatter(t, _ANCHOR, world, name))
    rows = all_to_all(x, counts, [counts[rank]] * world, name)
    return rows.view(world, counts[rank]).sum(0, dtype=x.dtype)


def reduce(x: Tensor, dst: int, rank: int, world: int, name: str) -> Tensor:
    """Sum over ranks on ``dst``; zeros on the others."""
    n = x.shape[0]
    send = [n if r == dst else 0 for r in range(world)]
    rows = all_to_all(x, send, [n if rank == dst else 0] * world, name)
    return rows.view(world, n).sum(0, dtype=x.dtype) if rank == dst else linked_zeros(rows, x.shape)


def sum_once(x: Tensor, name: str) -> Tensor:
    """A sum over ranks that counts once; its adjoint is ``share``."""
    return _as_real(x, lambda t, _: _OPS.sum_once(t, _ANCHOR, name))


def share(x: Tensor, name: str) -> Tensor:
    """The same value; its adjoint is ``sum_once``."""
    return _as_real(x, lambda t, _: _OPS.share(t, _ANCHOR, name))


def gather_once(x: Tensor, counts: Sequence[int], rank: int, name: str) -> Tensor:
    """Every rank's block, joined into a value that counts once; its adjoint is ``keep_block``."""
    return _as_real(
        x, lambda t, width: _OPS.gather_once(t, _ANCHOR, [n * width for n in counts], rank, name)
    )


def keep_block(x: Tensor, counts: Sequence[int], rank: int, name: str) -> Tensor:
    """The own block; its adjoint is ``gather_once``."""
    return _as_real(
        x, lambda t, width: _OPS.keep_block(t, _ANCHOR, [n * width for n in counts], rank, name)
    )


def broadcast_once(x: Tensor, src: int, name: str) -> Tensor:
    """What ``src`` holds, as a value that counts once; its adjoint is ``keep_on``."""
    return _as_real(x, lambda t, _: _OPS.broadcast_once(t, _ANCHOR, src, name))


def keep_on(x: Tensor, src: int, name: str) -> Tensor:
    """The same value on ``src``, zeros on the others; its adjoint is ``broadcast_once``."""
    return _as_real(x, lambda t, _: _OPS.keep_on(t, _ANCHOR, src, name))


def _as_real(x: Tensor, call: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Backends carry no complex numbers: two real ones each travel instead."""
    if not x.is_complex():
        return call(x, 1)
    return torch.view_as_complex(call(torch.view_as_real(x).view(-1), 2).view(-1, 2))


def _wait(started: Any) -> Tensor:
    done: Tensor = _C10D.wait_tensor(started)
    return done


def _named(group: str) -> Any:
    resolve: Callable[[str], Any] = torch._C._distributed_c10d._resolve_process_group  # type: ignore[assignment]  # noqa: SLF001
    return resolve(group)


def _rank_in(group: str) -> int:
    rank: int = _named(group).rank()
    return rank


def _gathered(x: Tensor, counts: Sequence[int], group: str) -> Tensor:
    world = len(counts)
    if all(count == counts[0] for count in counts) and not _gather_crashes(x, group):
        return _wait(_C10D.all_gather_into_tensor(x, world, group))
    copies = x.repeat(world, *(1 for _ in x.shape[1:]))
    return _wait(_C10D.all_to_all_single(copies, counts, [x.shape[0]] * world, group))


def _gather_crashes(x: Tensor, group: str) -> bool:
    """On tensors of a GPU, Gloo's functional all_gather ends the process (torch 2.11)."""
    if x.device.type == "cpu":
        return False
    return bool(_named(group)._get_backend(x.device).name() == "gloo")  # noqa: SLF001


def _op(schema: str, adjoint: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], None]:
    """Give a functional op and its wait a name of our own, with a batching rule and a derivative.

    Whatever is flat along its first dimension may be wider than one element: the batch goes last,
    and counts in elements become counts in rows.
    """
    name = schema.partition("(")[0]

    def register(lower: Callable[..., Tensor]) -> None:
        def op(x: Tensor, anchor: Tensor, *rest: Any) -> Tensor:
            done: Tensor = getattr(_OPS, name)(x, anchor, *rest)
            return done

        class AtOneLevel(_SingleLevelFunction):
            """The derivative at one level of torch.func, or at the only one there is."""

            @staticmethod
            def forward(x: Tensor, anchor: Tensor, *rest: Any) -> Tensor:
                if torch._C._functorch.is_functorch_wrapped_tensor(x):  # noqa: SLF001
                    with (
                        torch.enable_grad(),
                        _set_fwd_grad_enabled(True),
                        torch._C._AutoDispatchBelowAutograd(),  # noqa: SLF001
                    ):
                        return op(x, anchor, *rest)  # at the level below
                return lower(x, *rest)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
                ctx.anchor, *ctx.rest = inputs[1:]

            @staticmethod
            def backward(ctx: Any, y: Tensor) -> tuple[Tensor | None, ...]:
                back = adjoint(y.contiguous(), ctx.anchor, *ctx.rest)
                return back, None, *(None for _ in ctx.rest)

            @staticmethod
            def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
                return op(tangent.contiguous(), ctx.anchor, *ctx.rest)

        def at_each_level(x: Tensor, anchor: Tensor, *rest: Any) -> Tensor:
            with enable_single_level_autograd_function():
                done: Tensor = AtOneLevel.apply(x, anchor, *rest)  # type: ignore[attr-defined]
            return done

        def batched(
            info: Any, in_dims: tuple[int | None, ...], x: Tensor, anchor: Tensor, *rest: Any
        ) -> tuple[Tensor, int]:
            assert in_dims[0] is not None
            rows = x.movedim(in_dims[0], -1).contiguous()
            wide = [[n * info.batch_size for n in r] if isinstance(r, list) else r for r in rest]
            return op(rows.view(-1), anchor, *wide).view(-1, info.batch_size), 1

        _LIBRARY.define(schema)
        _LIBRARY.impl(name, at_each_level, "CompositeImplicitAutograd")
        torch.library.register_vmap(f"{_NAMESPACE}::{name}", batched, lib=_LIBRARY)

    return register


@_op(
    "all_reduce(Tensor x, Tensor anchor, str group) -> Tensor",
    lambda *args: _OPS.all_reduce(*args),  # noqa: PLW0108
)
def _(x: Tensor, group: str) -> Tensor:
    return _wait(_C10D.all_reduce(x, "sum", group))


@_op(
    "broadcast(Tensor x, Tensor anchor, int src, str group) -> Tensor",
    lambda y, anchor, src, group: _OPS.all_reduce(y, anchor, group) * (_rank_in(group) == src),
)
def _(x: Tensor, src: int, group: str) -> Tensor:
    return _wait(_C10D.broadcast(x, src, group))


@_op(
    "all_to_all(Tensor x, Tensor anchor, SymInt[] receive, SymInt[] send, str group) -> Tensor",
    lambda y, anchor, receive, send, group: _OPS.all_to_all(y, anchor, send, receive, group),
)
def _(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    return _wait(_C10D.all_to_all_single(x, receive, send, group))


@_op(
    "all_gather(Tensor x, Tensor anchor, int world, str group) -> Tensor",
    lambda *args: _OPS.reduce_scatter(*args),  # noqa: PLW0108
)
def _(x: Tensor, world: int, group: str) -> Tensor:
    return _gathered(x, [x.shape[0]] * world, group)


@_op(
    "reduce_scatter(Tensor x, Tensor anchor, int world, str group) -> Tensor",
    lambda *args: _OPS.all_gather(*args),  # noqa: PLW0108
)
def _(x: Tensor, world: int, group: str) -> Tensor:
    return _wait(_C10D.reduce_scatter_tensor(x, "sum", world, group))


@_op("sum_once(Tensor x, Tensor anchor, str group) -> Tensor", lambda *args: _OPS.share(*args))  # noqa: PLW0108
def _(x: Tensor, group: str) -> Tensor:
    return _wait(_C10D.all_reduce(x, "sum", group))


@_op("share(Tensor x, Tensor anchor, str group) -> Tensor", lambda *args: _OPS.sum_once(*args))  # noqa: PLW0108
def _(x: Tensor, group: str) -> Tensor:  # noqa: ARG001
    return x.clone()


@_op(
    "gather_once(Tensor x, Tensor anchor, SymInt[] counts, int rank, str group) -> Tensor",
    lambda *args: _OPS.keep_block(*args),  # noqa: PLW0108
)
def _(x: Tensor, counts: list[int], rank: int, group: str) -> Tensor:  # noqa: ARG001
    return _gathered(x, counts, group)


@_op(
    "keep_block(Tensor x, Tensor anchor, SymInt[] counts, int rank, str group) -> Tensor",
    lambda *args: _OPS.gather_once(*args),  # noqa: PLW0108
)
def _(x: Tensor, counts: list[int], rank: int, group: str) -> Tensor:  # noqa: ARG001
    return x.narrow(0, sum(counts[:rank]), counts[rank]).clone()


@_op(
    "broadcast_once(Tensor x, Tensor anchor, int src, str group) -> Tensor",
    lambda *args: _OPS.keep_on(*args),  # noqa: PLW0108
)
def _(x: Tensor, src: int, group: str) -> Tensor:
    return _wait(_C10D.broadcast(x, src, group))


@_op(
    "keep_on(Tensor x, Tensor anchor, int src, str group) -> Tensor",
    lambda *args: _OPS.broadcast_once(*args),  # noqa: PLW0108
)
def _(x: Tensor, src: int, group: str) -> Tensor:
    return x.clone() if _rank_in(group) == src else torch.zeros_like(x)
