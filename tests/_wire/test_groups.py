"""What is kept of process groups."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist

import allgrad as ag


@pytest.mark.ranks(2)
def test_a_group_outlives_the_use_of_many_others(rank):
    """Rank 0 alone uses hundreds of other groups; the messages of the first still have their numbers."""
    x = torch.arange(4.0)
    for _ in range(3):
        ag.all_to_all(x)
    others = [dist.new_group([0]) for _ in range(300)]
    if rank == 0:
        for group in others:
            ag.all_reduce(x, group=group)
    assert ag.all_to_all(x).tolist() == [2.0 * rank, 2.0 * rank + 1] * 2
    assert ag.all_gather(torch.ones(rank + 1)).tolist() == [1.0] * 3


@pytest.mark.ranks(2)
def test_the_thread_of_async_calls_ends_with_its_group(rank):
    group = dist.new_group()
    ag.all_reduce(torch.ones(2), group=group)
    before = set(threading.enumerate())
    ag.all_reduce(torch.ones(2), group=group, async_op=True).wait()
    (thread,) = set(threading.enumerate()) - before
    dist.destroy_process_group(group)
    del group
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
