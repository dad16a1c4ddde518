"""rename_prefix."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from allgrad.errors import InputError
from allgrad.module_state import rename_prefix


def test_names_change_in_place_and_keep_their_order():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    state = {"layer.w": a, "head.w": b, "layer.b": c, 7: None}
    rename_prefix(state, "layer.", "module.layer.")
    assert list(state) == ["module.layer.w", "head.w", "module.layer.b", 7]
    assert state["module.layer.w"] is a
    assert state["module.layer.b"] is c


def test_a_prefix_inside_its_own_new_name_is_added_once():
    state = {"a.x": 1, "a.a.x": 2}
    rename_prefix(state, "a.", "a.a.")
    assert state == {"a.a.x": 1, "a.a.a.x": 2}


def test_everything_can_move_under_a_name_and_back():
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    state = module.state_dict()
    before, versions = OrderedDict(state), dict(state._metadata)
    rename_prefix(state, "", "module.")
    wrapped = nn.Module()
    wrapped.module = module
    assert list(state) == list(wrapped.state_dict())
    assert state._metadata == {k: v for k, v in wrapped.state_dict()._metadata.items() if k}
    rename_prefix(state, "module.", "")
    assert list(state.items()) == list(before.items())
    assert state._metadata == versions


def test_versions_move_along_so_that_loading_finds_them():
    wrapped = nn.Module()
    wrapped.module = nn.BatchNorm1d(1)
    state = wrapped.state_dict()
    rename_prefix(state, "module.", "")
    assert state._metadata[""] == {"version": 2}
    nn.BatchNorm1d(1).load_state_dict(state)


def test_part_of_a_module_name_is_a_prefix_too():
    state = nn.ModuleDict({"layer1": nn.Linear(1, 1), "head": nn.Linear(1, 1)}).state_dict()
    rename_prefix(state, "layer", "block")
    assert [k for k in state if "block" in k] == ["block1.weight", "block1.bias"]
    assert list(state._metadata) == ["", "head", "block1"]


def test_equal_prefixes_raise():
    with pytest.raises(InputError, match="both 'a'"):
        rename_prefix({"a": 1}, "a", "a")


def test_two_entries_under_one_name_raise_and_change_nothing():
    state = {"a.x": 1, "b.x": 2}
    with pytest.raises(InputError, match=r"'a\.x' and 'b\.x' would both become 'b\.x'"):
        rename_prefix(state, "a.", "b.")
    assert state == {"a.x": 1, "b.x": 2}
