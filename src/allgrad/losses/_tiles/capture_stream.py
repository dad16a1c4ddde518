"""Streams on which steps are captured, each with memory for cuBLAS that stays where it is.

cuBLAS works in memory that torch keeps for each thread and stream, and gives back when it is asked to:
torch.compile does so before it captures a graph. A captured product still has the address. So for a
stream of captures it is taken from a pool that is kept. Steps of two streams may be replayed at the same
time, so they have two such streams (test_memory_of_cublas_is_given_back, test_two_streams_at_a_time).
"""

from __future__ import annotations

import threading

import torch

__all__ = ["capture_stream"]

_STREAMS_OF_TORCH = 32  # which it hands out in turns: somebody else may have multiplied on one

_streams: dict[tuple[torch.device, int, int], tuple[torch.cuda.Stream, torch.cuda.MemPool]] = {}
_pools: list[torch.cuda.MemPool] = []  # all of them, also those of streams that were replaced


def capture_stream(device: torch.device, stream: int) -> torch.cuda.Stream:
    """Where this thread captures steps that are replayed on ``stream``."""
    key = device, stream, threading.get_ident()
    if key in _streams and _works_in(*_streams[key]):
        return _streams[key][0]
    for _ in range(_STREAMS_OF_TORCH):
        side, pool = torch.cuda.Stream(device), torch.cuda.MemPool()
        if _works_in(side, pool):
            _streams[key] = side, pool
            _pools.append(pool)
            return side
    raise RuntimeError("all streams of torch have memory for cuBLAS elsewhere")


def _works_in(side: torch.cuda.Stream, pool: torch.cuda.MemPool) -> bool:
    """Whether cuBLAS works in memory of the pool there; memory that it has nowhere is taken from it."""
    current = torch.cuda.current_stream(side.device)
    x = torch.zeros(16, 16, dtype=torch.bfloat16, device=side.device)
    product = torch.empty_like(x)
    side.wait_stream(current)
    with torch.cuda.stream(side), torch.cuda.use_mem_pool(pool, side.device):
        torch.mm(x, x, out=product)
    current.wait_stream(side)
    blocks = (block for segment in pool.snapshot() for block in segment["blocks"])
    return any(block["state"] == "active_allocated" for block in blocks)
