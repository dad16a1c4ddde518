"""The implementations that are measured: allgrad's, and those of its peers, written with torch.

| implementation | what it is |
|---|---|
| raw | the backend's own call into a newly allocated output, and its adjoint, without autograd |
| raw copies | all_reduce as the backend's all_to_all of copies, then a local sum |
| raw gather | broadcast; its adjoint as the backend's gather, then a local sum |
| linear by hand | broadcast by sends from the root, its adjoint by sends to the root, all at once |
| pairwise by hand | all_to_all by a send to and a receive from every peer, all at once |
| chunked by hand | all_reduce or broadcast in chunks: each rank sums, or sends on, one chunk |
| star by hand | every rank sends to one root, which sends each rank its result |
| bare, bare star, bare linear | raw, star, linear inside an autograd.Function with nothing else |
| nn | torch.distributed.nn.functional |
| functional | torch.distributed's functional collectives, where their gradient is exact |
| pad, gather, select | common code for unequal pieces; its backward keeps the own part only |
| padded nn | the same with an exact gradient |
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.nn import functional as nn
from torch.nn.functional import pad

from allgrad._core.torch_internals import functional_collectives
from allgrad._wire.algorithms import TABLE
from allgrad.cli.bench import algorithms
from allgrad.collectives.all_gather import all_gather, reduce_scatter
from allgrad.collectives.all_reduce import all_reduce
from allgrad.collectives.all_to_all import all_to_all
from allgrad.collectives.broadcast import broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from allgrad.cli.bench.cases import Case

__all__ = ["Implementation", "barrier", "baseline_of", "implementations_of", "words_of"]

_ADJOINT = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "broadcast": "reduce",
}
Map: TypeAlias = "Callable[[list[Tensor]], list[Tensor]]"
functional = functional_collectives()


class Implementation(NamedTuple):
    """The map of tensors and the map of gradients; without ``backward``, autograd is used.

    ``algorithms`` are taken whatever their limits, by operation.
    """

    forward: Map
    backward: Map | None = None
    algorithms: Mapping[str, str] = MappingProxyType({})


def implementations_of(
    case: Case, rank: int, peers: Sequence[str] | None = None, *, every_algorithm: bool = False
) -> dict[str, Implementation]:
    """All implementations of a case by name, including its baseline.

    With ``peers``, the words of their names, of the others only those; with ``every_algorithm``,
    allgrad also by each algorithm that its table has for the operation.
    """
    if case.tensors > 1:
        found = _MANY
    elif case.skewed:
        found = _skewed(case, rank)
    else:
        found = _EQUAL[case.operation](rank)
    if peers is not None:
        found = {
            name: implementation
            for name, implementation in found.items()
            if name.startswith("allgrad")
            or name == baseline_of(case)
            or words_of(name) <= set(peers)
        }
    if every_algorithm and case.tensors == 1 and not case.skewed:
        found = found | _by_algorithm(case.operation, found["allgrad"])
    return found


def words_of(name: str) -> set[str]:
    """What a list with commas has of a name, which may have commas too."""
    return {word.strip() for word in name.split(",")}


def _by_algorithm(operation: str, ours: Implementation) -> dict[str, Implementation]:
    """The adjoint takes the algorithm of the same name, if it has one."""
    known = {one: {entry.name for entry in entries} for one, entries in TABLE.items()}
    return {
        f"allgrad, {entry.name}": ours._replace(
            algorithms={
                one: entry.name
                for one in (operation, _ADJOINT[operation])
                if entry.name in known[one]
            }
        )
        for entry in TABLE[operation]
    }


def baseline_of(case: Case) -> str:
    """The implementation that the others are compared with."""
    if case.tensors > 1:
        return "raw, flattened by hand"
    if case.skewed:
        return "pad, gather, select" if case.operation == "all_gather" else "raw, padded"
    return "raw"


def barrier() -> None:
    """Wait until all ranks are here."""
    dist.barrier()


def _single(
    forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor] | None = None
) -> Implementation:
    """An implementation for a single tensor."""
    return Implementation(lambda xs: [forward(xs[0])], backward and (lambda gs: [backward(gs[0])]))


def _bare(
    forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Implementation:
    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
            return forward(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
            return backward(gradients[0])

    return _single(Bare.apply)


def _functional(call: Callable[..., Any], *args: Any) -> Implementation:
    return _single(lambda x: call(x, *args, dist.group.WORLD).wait())


def _raw_all_gather(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x)
    return out


def _raw_reduce_scatter(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x)
    return out


def _raw_all_reduce(x: Tensor) -> Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def _raw_all_to_all(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def _raw_broadcast(x: Tensor, rank: int) -> Tensor:
    out = torch.empty_like(x) if rank else x.clone()
    dist.broadcast(out, 0)
    return out


def _raw_reduce(g: Tensor, rank: int) -> Tensor:
    out = g.clone()
    dist.reduce(out, 0)
    return out.zero_() if rank else out


def _raw_gather(g: Tensor, rank: int) -> Tensor:
    if rank:
        dist.gather(g)
        return torch.zeros_like(g)
    pieces = g.new_empty(dist.get_world_size(), *g.shape)
    dist.gather(g, list(pieces.unbind()))
    return pieces.sum(0)


def _raw_copies(x: Tensor) -> Tensor:
    copies = torch.stack([x] * dist.get_world_size())
    return _raw_all_to_all(copies).sum(0)


def _nn_reduce_scatter(x: Tensor) -> Tensor:
    parts = list(x.chunk(dist.get_world_size()))
    out: Tensor = nn.reduce_scatter(torch.empty_like(parts[0]), parts, group=dist.group.WORLD)
    return out


# torch 2.13 renamed the functional collectives; the old names warn there.
_GATHER = getattr(functional, "all_gather_single_autograd", functional.all_gather_tensor_autograd)
_SCATTER = getattr(
    functional, "reduce_scatter_single_autograd", functional.reduce_scatter_tensor_autograd
)

_EQUAL: dict[str, Callable[[int], dict[str, Implementation]]] = {
    "all_gather": lambda _: {
        "allgrad": _single(lambda x: all_gather(x, sizes="equal")),
        "raw": _single(_raw_all_gather, _raw_reduce_scatter),
        "nn": _single(lambda x: torch.cat(nn.all_gather(x, dist.group.WORLD))),
        "functional": _functional(_GATHER, 0),
    },
    "reduce_scatter": lambda _: {
        "allgrad": _single(lambda x: reduce_scatter(x, sizes="equal")),
        "raw": _single(_raw_reduce_scatter, _raw_all_gather),
        "nn": _single(_nn_reduce_scatter),
        "functional": _functional(_SCATTER, "sum", 0),
    },
    "all_reduce": lambda rank: {
        "allgrad": _single(all_reduce),
        "raw": _single(_raw_all_reduce, _raw_all_reduce),
        "raw copies": _single(_raw_copies, _raw_copies),
        "star by hand": _single(
            partial(algorithms.star_all_reduce, rank=rank),
            partial(algorithms.star_all_reduce, rank=rank),
        ),
        "chunked by hand": _single(algorithms.chunked_all_reduce, algorithms.chunked_all_reduce),
        "bare": _bare(_raw_all_reduce, _raw_all_reduce),
        "bare star": _bare(
            partial(algorithms.star_all_reduce, rank=rank),
            partial(algorithms.star_all_reduce, rank=rank),
        ),
        "nn": _single(lambda x: nn.all_reduce(x, group=dist.group.WORLD)),
        "functional": _functional(functional.all_reduce, "sum"),
    },
    "broadcast": lambda rank: {
        "allgrad": _single(broadcast),
        "raw": _single(partial(_raw_broadcast, rank=rank), partial(_raw_reduce, rank=rank)),
        "raw gather": _single(partial(_raw_broadcast, rank=rank), partial(_raw_gather, rank=rank)),
        "linear by hand": _single(
            partial(algorithms.linear_broadcast, rank=rank),
            partial(algorithms.linear_reduce, rank=rank),
        ),
        "chunked by hand": _single(
            partial(algorithms.chunked_broadcast, rank=rank),
            partial(algorithms.chunked_reduce, rank=rank),
        ),
        "bare linear": _bare(
            partial(algorithms.linear_broadcast, rank=rank),
            partial(algorithms.linear_reduce, rank=rank),
        ),
        "nn": _single(lambda x: nn.broadcast(x, 0, dist.group.WORLD)),
    },
    "all_to_all": lambda rank: {
        "allgrad": _single(lambda x: all_to_all(x, send_sizes="equal")),
        "raw": _single(_raw_all_to_all, _raw_all_to_all),
        "star by hand": _single(
            partial(algorithms.star_all_to_all, rank=rank),
            partial(algorithms.star_all_to_all, rank=rank),
        ),
        "pairwise by hand": _single(algorithms.pairwise_all_to_all, algorithms.pairwise_all_to_all),
        "bare": _bare(_raw_all_to_all, _raw_all_to_all),
        "nn": _single(
            lambda x: nn.all_to_all_single(torch.empty_like(x), x, group=dist.group.WORLD)
        ),
        "functional": _functional(functional.all_to_all_single_autograd, None, None),
    },
}


def _flattened(xs: list[Tensor]) -> list[Tensor]:
    flat = _raw_all_reduce_in_place(torch.cat([x.reshape(-1) for x in xs]))
    parts = flat.split([x.numel() for x in xs])
    return [part.view(x.shape) for part, x in zip(parts, xs, strict=True)]


def _raw_all_reduce_in_place(flat: Tensor) -> Tensor:
    dist.all_reduce(flat)
    return flat


def _each(call: Callable[[Tensor], Tensor]) -> Map:
    return lambda xs: [call(x) for x in xs]


_MANY = {
    "allgrad, one nest": Implementation(all_reduce),
    "allgrad, one by one": Implementation(_each(all_reduce)),
    "raw, one by one": Implementation(_each(_raw_all_reduce), _each(_raw_all_reduce)),
    "raw, flattened by hand": Implementation(_flattened, _flattened),
}


def _skewed(case: Case, rank: int) -> dict[str, Implementation]:
    rows = case.rows
    if case.operation == "all_gather":
        return {
            "allgrad": _single(all_gather),
            "allgrad, sizes given": _single(lambda x: all_gather(x, sizes=rows)),
            "pad, gather, select": _single(_PadGatherSelect.apply),
            "padded nn": _single(_padded_nn),
        }
    return {
        "allgrad": _single(lambda x: reduce_scatter(x, sizes=rows)),
        "raw, padded": _single(
            lambda x: _raw_reduce_scatter(_pad_blocks(x, rows))[: rows[rank]],
            lambda g: _select(_raw_all_gather(_pad_rows(g, max(rows))), rows),
        ),
    }


def _exchange_sizes(x: Tensor) -> list[int]:
    sizes = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([x.shape[0]]))
    found: list[int] = sizes.tolist()
    return found


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    return pad(x, (0, 0, 0, rows - x.shape[0]))


def _pad_blocks(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Pad every block to the length of the longest."""
    return torch.cat([_pad_rows(block, max(rows)) for block in x.split(rows)])


def _select(padded: Tensor, rows: tuple[int, ...] | list[int]) -> Tensor:
    """Drop the padding, by a mask over rows."""
    position = torch.arange(max(rows))
    kept = (position < torch.tensor(rows).unsqueeze(1)).view(-1).nonzero().view(-1)
    return padded.index_select(0, kept)


class _PadGatherSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.sizes, ctx.rank = _exchange_sizes(x), dist.get_rank()
        padded = _pad_rows(x, max(ctx.sizes))
        gathered = [torch.empty_like(padded) for _ in ctx.sizes]
        dist.all_gather(gathered, padded)
        return _select(torch.cat(gathered), ctx.sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        own: Tensor = gradients[0].split(ctx.sizes)[ctx.rank]
        return own


def _padded_nn(x: Tensor) -> Tensor:
    sizes = _exchange_sizes(x)
    return _select(torch.cat(nn.all_gather(_pad_rows(x, max(sizes)), dist.group.WORLD)), sizes)
