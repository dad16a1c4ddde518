"""Which steps of one rank alone are captured; that they are exact is in test_one_rank.py, on a device."""

import pytest
import torch

from allgrad.losses._kind import LossKind

replay = pytest.importorskip("allgrad.losses._tiles.replay", exc_type=ImportError)


def test_another_thread_may_count_while_a_step_is_captured(monkeypatch):
    known, x = replay._Known(), torch.zeros(2, 3, dtype=torch.bfloat16)
    shape, needed = x.shape, (True, True)
    key = replay._Key(LossKind.SIGMOID, shape, x.dtype, x.device, 0, needed, has_bias=False)

    def captured(*_):
        known.counts.clear()  # as a thread does that has seen many other sizes
        return "a step"

    monkeypatch.setattr(replay, "max_bytes", lambda _: key.bytes)
    monkeypatch.setattr(replay, "_Captured", captured)
    for _ in range(replay.AFTER_CALLS):
        assert not known.steps
        known.count(key, x, x.sum())
    assert known.steps == {key: "a step"}
