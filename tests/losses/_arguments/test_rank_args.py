"""The message of the handshake: what is sent is what is read, and no message can crash its reader."""

import random
import time
from contextlib import suppress

import pytest
import torch

from allgrad.errors import AllgradError, InputError
from allgrad.losses._arguments.argument_rules import check_args
from allgrad.losses._arguments.rank_args import GradNeeds, RankArgs, TensorSpec
from allgrad.losses._kind import LossKind

GIVEN = (torch.ones(3, 4), torch.ones(2, 3, 4).half(), torch.ones(5).long(), None, [1.0])


def args_of(chance):
    """The arguments of some rank, right or wrong."""
    scalars = (torch.tensor(chance.random()), torch.tensor(float("nan")), torch.tensor(3), None)
    return RankArgs(
        chance.choice(list(LossKind)),
        chance.getrandbits(56),
        GradNeeds(chance.randrange(4)),
        tuple(TensorSpec.of(n, chance.choice(GIVEN), read=False) for n in ("query", "key", "more")),
        tuple(TensorSpec.of(n, chance.choice(scalars), read=True) for n in ("scale", "bias")),
    )


def damaged(words, chance):
    """A message with some words changed, cut off, or replaced altogether."""
    how = chance.random()
    if how < 0.1:
        return [chance.getrandbits(64) - 2**63 for _ in range(chance.randrange(2 * len(words)))]
    if how < 0.2:
        return words[: chance.randrange(len(words))]
    words = list(words)
    for _ in range(chance.randrange(1, 6)):
        words[chance.randrange(len(words))] = chance.choice(
            [0, -1, 1, 99, 2**63 - 1, -(2**63), chance.getrandbits(64) - 2**63]
        )
    return words


def table(_rule, marks, _advice):
    return str(marks)


def test_message_is_read_as_it_was_written():
    chance = random.Random(1)
    for _ in range(200):
        args = args_of(chance)
        read = args.decode(args.encode(), 0)
        assert str(read) == str(args)
        assert read.encode() == args.encode()  # as words, because NaN differs from itself


def test_message_has_one_length_for_every_loss():
    chance = random.Random(2)
    clip, info_nce = args_of(chance), args_of(chance)
    clip = RankArgs(clip.kind, clip.options, clip.needs, clip.features[:2], clip.scalars[:1])
    assert len(clip.encode()) == len(info_nce.encode())


def test_long_shape_is_cut():
    args = args_of(random.Random(3))
    spec = TensorSpec.of("query", torch.ones((1,) * 12), read=False)
    args = RankArgs(args.kind, args.options, args.needs, (spec, spec, spec), args.scalars)
    assert args.decode(args.encode(), 0).features[0].shape == (1,) * 8


def test_damaged_messages_raise_or_are_read():
    chance = random.Random(0)
    refused, count = 0, 30_000
    for _ in range(count):
        args = args_of(chance)
        try:
            read = args.decode(damaged(args.encode(), chance), 1)
        except AllgradError:
            refused += 1
        else:  # what was read can be printed and checked too
            assert str(read)
            with suppress(InputError):
                check_args("loss", [args, read], table)
    assert count / 2 < refused < count


def test_dtype_number_out_of_range_names_the_rank():
    args = args_of(random.Random(4))
    words = args.encode()
    words[6] = 99
    with pytest.raises(AllgradError, match="message from rank 7 is damaged"):
        args.decode(words, 7)


def test_check_of_many_ranks_is_linear():
    """Quadratic work would take minutes for this many ranks."""
    kind, needs = LossKind.SOFTMAX_BOTH, GradNeeds(0)
    features = tuple(TensorSpec.of(n, torch.ones(2, 4), read=False) for n in ("image", "text"))
    scalars = (TensorSpec.of("scale", torch.tensor(1.0), read=True),)
    ranks = [RankArgs(kind, 0, needs, features, scalars) for _ in range(20_000)]
    start = time.perf_counter()
    check_args("loss", ranks, table)
    ranks[777] = RankArgs(kind, 1, needs, features, scalars)
    with pytest.raises(InputError, match=r"^\{777: 'other options'\}$"):
        check_args("loss", ranks, table)
    assert time.perf_counter() - start < 10
