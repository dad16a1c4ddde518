"""open_clip: the losses of create_loss, and the gather inside its own losses."""

from types import SimpleNamespace

import pytest
import torch

from allgrad.errors import InputError
from integrations.comparison import Comparison, needs, random

pytestmark = needs("open_clip", "open-clip")

# What their create_loss reads; the gradient of all ranks' features, as their README advises.
ARGS = {
    "model": "ViT-B-32",
    "distill": False,
    "siglip": False,
    "horovod": False,
    "rank": 0,
    "world_size": 1,
    "local_loss": True,
    "gather_with_grad": True,
    "loss_dist_impl": None,
    "coca_caption_loss_weight": 2.0,
    "coca_contrastive_loss_weight": 1.0,
}


def their_loss(args, distributed=True, **options):
    import open_clip
    import torch.distributed as dist

    world = {"rank": dist.get_rank(), "world_size": dist.get_world_size()} if distributed else {}
    return open_clip.create_loss(SimpleNamespace(**{**ARGS, **args, **world, **options}))


def our_loss(args, **_):
    from allgrad.integrations.open_clip import create_loss

    return create_loss(SimpleNamespace(**{**ARGS, **args}))


def contrastive(loss, model, x):
    image, text, scale = model(x)
    return (
        loss(image, text, scale, scale)
        if "SigLip" in type(loss).__name__
        else loss(image, text, scale)
    )


def distilled(loss, model, x):
    image, text, scale = model(x)
    teacher = x[:, 0, :3], x[:, 1, :3]
    return sum(loss(image, text, scale, *teacher, scale.detach()))


def captioned(loss, model, x):
    """Captions of three tokens, one or two of which are padding."""
    image, text, scale = model(x)
    logits = torch.stack([image, text, image * text], 1)
    labels = torch.tensor([[1, 2, 0]]).repeat(len(x), 1)
    labels[x[:, 0, 0] > 0, 1] = 0
    return sum(loss(image, text, logits, labels, scale))


def compare(step, args, **options):
    return Comparison(
        lambda model, x: step(their_loss(args, distributed=False), model, x),
        lambda model, x: step(our_loss(args), model, x),
        lambda model, x: step(their_loss(args, **options), model, x),
    )


def gathered(model, x):
    from allgrad.integrations.open_clip import exact_gather

    with exact_gather():
        return contrastive(their_loss({}, local_loss=False, gather_with_grad=False), model, x)


COMPARISONS = {
    "ClipLoss, their default": compare(contrastive, {}, local_loss=False, gather_with_grad=False),
    "ClipLoss, local_loss": compare(contrastive, {}),
    "SigLipLoss": compare(contrastive, {"siglip": True}),
    "DistillClipLoss": compare(distilled, {"distill": True}),
    "CoCaLoss": compare(captioned, {"model": "coca_ViT-B-32"}),
    "exact_gather": Comparison(
        lambda model, x: contrastive(their_loss({}, distributed=False), model, x), gathered
    ),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_gradients_are_those_of_one_process(name):
    COMPARISONS[name].check()


@pytest.mark.ranks(2)
def test_local_loss_with_unequal_batches_is_refused_on_every_rank(rank):
    from allgrad.integrations.open_clip import gather_features

    x = random(2 + rank, 3)
    with pytest.raises(InputError, match="local_loss needs equal batches"):
        gather_features(x, x, local_loss=True)
