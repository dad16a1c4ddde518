"""torch.export of a module with collectives: values, gradients, other sizes, saved and loaded."""

import io

import pytest
import torch
import torch.distributed as dist

import allgrad as ag
from allgrad.losses import clip_loss, multiple_negatives_loss
from allgrad.testing import run_ranks
from exactness import random


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(random((2, 2), 7))

    def forward(self, x):
        everyone = ag.all_gather((x @ self.weight).sin())
        return ag.all_reduce(everyone.sum(0)) * ag.reduce_scatter(everyone).sum()


def outcome(layer, x):
    y = layer(x)
    return y.detach(), torch.autograd.grad(y.square().sum(), next(layer.parameters()))[0]


def export_and_run(strict):
    rank = dist.get_rank()
    rows = {"x": {0: torch.export.Dim("rows", min=1, max=64)}}
    x, other = random((2 + rank, 2), rank), random((5 - rank, 2), 10 + rank)
    program = torch.export.export(Layer(), (x,), dynamic_shapes=rows, strict=strict)
    made = [Layer(), program.module()]
    if not strict:  # torch 2.13 cannot write the sum of sizes that TorchDynamo makes of it
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        made.append(torch.export.load(file).module())
    return [[outcome(layer, piece) for layer in made] for piece in (x, other)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_is_exact(strict):
    for by_rank in run_ranks(export_and_run, 2, strict, timeout=180):
        for eager, *exported in by_rank:
            assert eager[1].abs().sum() > 0
            for made in exported:
                torch.testing.assert_close(made, eager, rtol=1e-12, atol=1e-12)


class Loss(torch.nn.Module):
    def forward(self, query, key):
        return clip_loss(query, key, 3.0) + multiple_negatives_loss(key, query, 2.0)


def export_loss_and_run(strict):
    """Traced with features that need no gradient, run with features that do."""
    rank = dist.get_rank()
    rows = torch.export.Dim("rows", min=1, max=64)
    pieces = [random((2 + rank, 3), 20 + 3 * side + rank) for side in (0, 1)]
    program = torch.export.export(
        Loss(), tuple(pieces), dynamic_shapes=({0: rows}, {0: rows}), strict=strict
    )
    found = []
    for made in (Loss(), program.module()):
        own = [random((4 - rank, 3), 30 + 3 * side + rank).requires_grad_() for side in (0, 1)]
        value = made(*own)
        value.backward()
        found.append([value.detach(), *(x.grad for x in own)])
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_loss_gives_the_gradients_of_its_inputs_of_the_call(strict):
    for eager, exported in run_ranks(export_loss_and_run, 3, strict, timeout=180):
        assert all(x.abs().sum() > 0 for x in eager)
        torch.testing.assert_close(exported, eager, rtol=1e-12, atol=1e-12)
