"""The ways that are measured: allgrad's, and those of its peers, written here against torch.

| way | what it is |
|---|---|
| raw | the backend's own call into a newly allocated output, and its adjoint, without autograd |
| raw copies | a sum as the backend's all_to_all of copies, and then adding |
| raw gather | broadcast, and back by the backend's gather, and then adding |
| sends by hand | broadcast by sends from the source, and back by sends to it, all at once |
| pairs by hand | blocks sent to every peer, all at once |
| shares by hand | a sum or a broadcast in shares: each rank adds up, or passes on, one of them |
| hub by hand | everything sent to one rank, which sends everyone what is theirs |
| bare, bare hub, bare sends | such calls inside an autograd.Function with nothing else |
| nn | torch.distributed.nn.functional |
| functional | torch.distributed's functional collectives, where their gradient is exact |
| pad, gather, select | the usual way with unequal pieces; its backward keeps the own part only |
| padded nn | the same with an exact gradient |
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as nn
from torch.nn.functional import pad

from allgrad.cli.bench import by_hand
from allgrad.collectives.all_gather import all_gather, reduce_scatter
from allgrad.collectives.all_reduce import all_reduce
from allgrad.collectives.all_to_all import all_to_all
from allgrad.collectives.broadcast import broadcast

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from allgrad.cli.bench.cases import Case

__all__ = ["Way", "barrier", "base_of", "ways_of"]

Map: TypeAlias = "Callable[[list[Tensor]], list[Tensor]]"


class Way(NamedTuple):
    """Tensors to tensors, and gradients to gradients; without ``backward``, by autograd."""

    forward: Map
    backward: Map | None = None


def ways_of(case: Case, rank: int) -> dict[str, Way]:
    """Name every way of doing the case, the one the others are compared with included."""
    if case.tensors > 1:
        return _MANY
    if case.skewed:
        return _skewed(case, rank)
    found: dict[str, Way] = _EQUAL[case.operation](rank)
    return found


def base_of(case: Case) -> str:
    """The way that the others are compared with."""
    if case.tensors > 1:
        return "raw, flattened by hand"
    if case.skewed:
        return "pad, gather, select" if case.operation == "all_gather" else "raw, padded"
    return "raw"


def barrier() -> None:
    """Let no rank begin before all are there."""
    dist.barrier()


def _way(
    forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor] | None = None
) -> Way:
    """A way for a single tensor."""
    return Way(lambda xs: [forward(xs[0])], backward and (lambda gs: [backward(gs[0])]))


def _bare(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Way:
    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
            return forward(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
            return backward(gradients[0])

    return _way(Bare.apply)


def _waited(call: Callable[..., Any], *args: Any) -> Way:
    return _way(lambda x: call(x, *args, dist.group.WORLD).wait())


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
    out: Tensor = nn.reduce_scatter(torch.empty_like(parts[0]), parts)
    return out


# The functional collectives were renamed in torch 2.13; the old names warn there.
_GATHER = getattr(functional, "all_gather_single_autograd", functional.all_gather_tensor_autograd)
_SCATTER = getattr(
    functional, "reduce_scatter_single_autograd", functional.reduce_scatter_tensor_autograd
)

_EQUAL: dict[str, Callable[[int], dict[str, Way]]] = {
    "all_gather": lambda _: {
        "allgrad": _way(lambda x: all_gather(x, sizes="equal")),
        "raw": _way(_raw_all_gather, _raw_reduce_scatter),
        "nn": _way(lambda x: torch.cat(nn.all_gather(x))),
        "functional": _waited(_GATHER, 0),
    },
    "reduce_scatter": lambda _: {
        "allgrad": _way(lambda x: reduce_scatter(x, sizes="equal")),
        "raw": _way(_raw_reduce_scatter, _raw_all_gather),
        "nn": _way(_nn_reduce_scatter),
        "functional": _waited(_SCATTER, "sum", 0),
    },
    "all_reduce": lambda rank: {
        "allgrad": _way(all_reduce),
        "raw": _way(_raw_all_reduce, _raw_all_reduce),
        "raw copies": _way(_raw_copies, _raw_copies),
        "hub by hand": _way(
            partial(by_hand.summed_by_hub, rank=rank), partial(by_hand.summed_by_hub, rank=rank)
        ),
        "shares by hand": _way(by_hand.summed_in_shares, by_hand.summed_in_shares),
        "bare": _bare(_raw_all_reduce, _raw_all_reduce),
        "bare hub": _bare(
            partial(by_hand.summed_by_hub, rank=rank), partial(by_hand.summed_by_hub, rank=rank)
        ),
        "nn": _way(nn.all_reduce),
        "functional": _waited(functional.all_reduce, "sum"),
    },
    "broadcast": lambda rank: {
        "allgrad": _way(broadcast),
        "raw": _way(partial(_raw_broadcast, rank=rank), partial(_raw_reduce, rank=rank)),
        "raw gather": _way(partial(_raw_broadcast, rank=rank), partial(_raw_gather, rank=rank)),
        "sends by hand": _way(
            partial(by_hand.sent_out, rank=rank), partial(by_hand.sent_back, rank=rank)
        ),
        "shares by hand": _way(
            partial(by_hand.passed_on, rank=rank), partial(by_hand.passed_back, rank=rank)
        ),
        "bare sends": _bare(
            partial(by_hand.sent_out, rank=rank), partial(by_hand.sent_back, rank=rank)
        ),
        "nn": _way(lambda x: nn.broadcast(x, 0)),
    },
    "all_to_all": lambda rank: {
        "allgrad": _way(lambda x: all_to_all(x, send_sizes="equal")),
        "raw": _way(_raw_all_to_all, _raw_all_to_all),
        "hub by hand": _way(
            partial(by_hand.exchanged_by_hub, rank=rank),
            partial(by_hand.exchanged_by_hub, rank=rank),
        ),
        "pairs by hand": _way(by_hand.exchanged_in_pairs, by_hand.exchanged_in_pairs),
        "bare": _bare(_raw_all_to_all, _raw_all_to_all),
        "nn": _way(lambda x: nn.all_to_all_single(torch.empty_like(x), x)),
        "functional": _waited(functional.all_to_all_single_autograd, None, None),
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
    "allgrad, one nest": Way(all_reduce),
    "allgrad, one by one": Way(_each(all_reduce)),
    "raw, one by one": Way(_each(_raw_all_reduce), _each(_raw_all_reduce)),
    "raw, flattened by hand": Way(_flattened, _flattened),
}


def _skewed(case: Case, rank: int) -> dict[str, Way]:
    rows = case.rows
    if case.operation == "all_gather":
        return {
            "allgrad": _way(all_gather),
            "allgrad, sizes given": _way(lambda x: all_gather(x, sizes=rows)),
            "pad, gather, select": _way(_PadGatherSelect.apply),
            "padded nn": _way(_padded_nn),
        }
    return {
        "allgrad": _way(lambda x: reduce_scatter(x, sizes=rows)),
        "raw, padded": _way(
            lambda x: _raw_reduce_scatter(_spread(x, rows))[: rows[rank]],
            lambda g: _select(_raw_all_gather(_lengthened(g, max(rows))), rows),
        ),
    }


def _found_sizes(x: Tensor) -> list[int]:
    sizes = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([x.shape[0]]))
    found: list[int] = sizes.tolist()
    return found


def _lengthened(x: Tensor, rows: int) -> Tensor:
    return pad(x, (0, 0, 0, rows - x.shape[0]))


def _spread(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Every block padded to the longest."""
    return torch.cat([_lengthened(block, max(rows)) for block in x.split(rows)])


def _select(padded: Tensor, rows: tuple[int, ...] | list[int]) -> Tensor:
    """What is not padding, by a mask over rows."""
    place = torch.arange(max(rows))
    kept = (place < torch.tensor(rows).unsqueeze(1)).view(-1).nonzero().view(-1)
    return padded.index_select(0, kept)


class _PadGatherSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.sizes, ctx.rank = _found_sizes(x), dist.get_rank()
        padded = _lengthened(x, max(ctx.sizes))
        gathered = [torch.empty_like(padded) for _ in ctx.sizes]
        dist.all_gather(gathered, padded)
        return _select(torch.cat(gathered), ctx.sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        own: Tensor = gradients[0].split(ctx.sizes)[ctx.rank]
        return own


def _padded_nn(x: Tensor) -> Tensor:
    sizes = _found_sizes(x)
    return _select(torch.cat(nn.all_gather(_lengthened(x, max(sizes)))), sizes)
