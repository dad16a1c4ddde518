"""free_storage, restore_storage, is_allocated."""

import numpy as np
import pytest
import torch
from torch import nn

from allgrad.errors import InputError, TensorError
from allgrad.module_state import free_storage, is_allocated, restore_storage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128])
def test_memory_goes_and_comes_back(dtype):
    t = torch.ones(3, 4, dtype=dtype).t()
    assert free_storage(t) is True
    assert free_storage(t) is False
    assert not is_allocated(t)
    assert t.untyped_storage().size() == 0
    assert (t.shape, t.stride(), t.dtype) == ((4, 3), (1, 4), dtype)
    assert restore_storage(t) is True
    assert restore_storage(t) is False
    assert is_allocated(t)
    assert t.fill_(1).eq(1).all()


def test_a_view_of_the_whole_loses_and_regains_its_memory():
    t = torch.ones(6)
    view = t.view(2, 3)
    free_storage(t)
    assert not is_allocated(view)
    restore_storage(t)
    t.fill_(5)
    assert view.tolist() == [[5] * 3] * 2


def test_a_parameter_keeps_its_gradient():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    free_storage(p)
    restore_storage(p, p.shape)
    assert p.grad.tolist() == [1, 1]
    assert p.requires_grad


@pytest.mark.parametrize("part", [slice(0, 2), slice(2, 4), slice(1, 3), slice(None, None, 2)])
def test_memory_shared_with_others_is_not_freed(part):
    whole = torch.arange(4)
    with pytest.raises(TensorError, match="only a part of its storage"):
        free_storage(whole[part])
    assert whole.tolist() == [0, 1, 2, 3]


def test_expanded_tensor_is_refused():
    with pytest.raises(TensorError, match="only a part of its storage"):
        free_storage(torch.ones(1).expand(4))


def test_empty_tensor_has_nothing_to_free():
    t = torch.ones(0, 3)
    assert not is_allocated(t)
    assert free_storage(t) is False
    assert restore_storage(t) is False


def test_more_memory_than_needed_may_be_asked_for():
    t = torch.ones(3)
    free_storage(t)
    assert restore_storage(t, torch.Size([2, 4])) is True
    assert t.untyped_storage().size() == 32
    with pytest.raises(TensorError, match="another size"):
        restore_storage(t, 4)


def test_too_little_memory_is_refused():
    t = torch.ones(3)
    free_storage(t)
    with pytest.raises(InputError, match="at least 3"):
        restore_storage(t, (2, 1))
    with pytest.raises(InputError, match="negative"):
        restore_storage(t, (-3, -1))
    assert not is_allocated(t)


def test_tensors_without_memory_of_their_own_are_refused():
    for call in (free_storage, restore_storage):
        with pytest.raises(TensorError, match="meta"):
            call(torch.ones(2, device="meta"))
        with pytest.raises(TensorError, match="not a tensor"):
            call([1.0])
    with pytest.raises(TensorError, match="NumPy"):
        free_storage(torch.from_numpy(np.ones(2)))
