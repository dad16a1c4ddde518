"""Accumulators cast to 16 bits in their own memory."""

import pytest
import torch

from allgrad.losses._tiles.accumulators import accumulator_zeros, scale_and_cast
from exactness import random


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 33, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parts_become_one_tensor(rows, dtype):
    like = torch.empty(rows, 5, dtype=dtype)
    want = random((rows, 5), 3, torch.float32)
    parts = accumulator_zeros(like, dtype)
    assert sum(len(p) for p in parts) == rows
    start = 0
    for part in parts:
        part.copy_(want[start : start + len(part)])
        start += len(part)
    memory = parts[0].data_ptr()
    gain = torch.tensor(0.3)
    got = scale_and_cast(parts, gain, dtype)
    assert torch.equal(got, (want * gain).to(dtype))
    if rows > 1:
        assert got.data_ptr() == memory
        assert got.untyped_storage().nbytes() <= (rows + 1) * 5 * dtype.itemsize
