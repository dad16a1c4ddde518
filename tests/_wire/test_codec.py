"""Nothing received is ever unpickled or evaluated, and no message can crash its reader."""

import ast
import os
import random
from pathlib import Path

import pytest
import torch

from allgrad._wire.consistency import CallSpec
from allgrad._wire.handshake import ROW, RankArgs, TensorSpec
from allgrad.errors import AllgradError, SizesError, TensorError
from allgrad.module_state import _messages as state_messages
from allgrad.module_state._specs import EntrySpec

SRC = Path(__file__).parent.parent.parent / "src" / "allgrad"
RANKS = 3
MESSAGES = 100_000 if os.environ.get("ALLGRAD_ALL") else 20_000


def rank_args(chance):
    shapes = [tuple(chance.randrange(9) for _ in range(chance.randrange(4))) for _ in range(3)]
    specs = tuple(TensorSpec(torch.float32, shape, 0) for shape in shapes)
    problem = SizesError("sizes that do not fit") if chance.random() < 0.3 else None
    return RankArgs("all_gather", specs, chance.randrange(99), problem=problem).encode()


def call_spec(chance):
    counts = tuple(chance.randrange(9) for _ in range(RANKS))
    return CallSpec(
        chance.randrange(99),
        "all_to_all",
        torch.float64,
        0,
        -1,
        "call(é)",
        "a.py:3",
        chance.randrange(99),
        chance.randrange(-1, 9),
        counts,
        counts,
    ).encode(RANKS)


def state_digest(chance):
    problem = TensorError("a is not dense") if chance.random() < 0.3 else None
    return state_messages.encode_digest(str(chance.random()), problem)


def state_specs(chance):
    return state_messages.encode_specs({"w": EntrySpec("buffer", str(chance.random()), "(2,)")})


def state_settings(chance):
    return state_messages.encode_settings(["ä\udc80", chance.randrange(99)])


def mutated(words, chance):
    """A message with some words changed, cut, or replaced altogether."""
    words = list(words)
    kind = chance.random()
    if kind < 0.1:
        return [chance.getrandbits(64) - 2**63 for _ in range(chance.randrange(2 * ROW))]
    if kind < 0.2:
        return words[: chance.randrange(len(words))]
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(min(len(words), 20 if chance.random() < 0.8 else len(words)))
        words[place] = chance.choice(
            [0, -1, 1, 2**63 - 1, -(2**63), chance.getrandbits(64) - 2**63, chance.randrange(100)]
        )
    return words


@pytest.mark.parametrize(
    ("make", "decode"),
    [
        (rank_args, lambda words: RankArgs.decode(words, 1)),
        (call_spec, lambda words: CallSpec.decode(words, RANKS, 1)),
        (state_digest, lambda words: state_messages.decode_digest(words, 1)),
        (state_specs, lambda words: state_messages.decode_specs(words, 1)),
        (state_settings, lambda words: state_messages.decode_settings(words, 1, 2)),
    ],
    ids=["handshake", "check", "state digest", "state specs", "state settings"],
)
def test_damaged_messages_are_refused_or_read(make, decode):
    chance = random.Random(0)
    refused = 0
    originals = [make(chance) for _ in range(50)]
    for original in originals:
        decode(original)
    for _ in range(MESSAGES):
        try:
            decode(mutated(chance.choice(originals), chance))
        except AllgradError:
            refused += 1
    assert MESSAGES / 2 < refused < MESSAGES


def test_a_check_comes_out_as_it_went_in():
    chance = random.Random(1)
    for _ in range(100):
        words = call_spec(chance)
        assert CallSpec.decode(words, RANKS, 1).encode(RANKS) == words


FORBIDDEN = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "eval", "exec"}


@pytest.mark.parametrize(
    "path",
    sorted(p for p in SRC.rglob("*.py") if "testing" not in p.parts),
    ids=lambda p: str(p.relative_to(SRC)),
)
def test_nothing_is_unpickled_or_evaluated(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = set()
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = {node.func.id}
        assert not names & FORBIDDEN, f"{path}:{node.lineno}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("torch", "load"), f"{path}:{node.lineno}"
