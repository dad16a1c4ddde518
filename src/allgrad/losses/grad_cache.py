"""Gradient caching: train on a batch whose activations do not fit into memory at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack, contextmanager, suppress
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from allgrad._core.module_internals import active_ddp_module, sync_ddp_buffers
from allgrad._wire import ended_ranks
from allgrad._wire.calls import resolve
from allgrad._wire.consistency import refuse
from allgrad.collectives.all_gather import gather_sizes
from allgrad.errors import AllgradError, InputError, rank_table
from allgrad.losses._encoder_outputs import Output, find_scalars, join, split_gradients
from allgrad.losses._encoder_state import (
    kept_buffers,
    random_devices,
    random_state,
    set_random_state,
)
from allgrad.losses._loss_parameters import LossParameters, uses_others

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from allgrad.types import GroupLike


__all__ = ["grad_cache_step"]

Batch = TypeVar("Batch")


def grad_cache_step(
    encode: Callable[[Batch], Any],
    micro_batches: Iterable[Batch],
    loss: Callable[..., Tensor],
    *,
    models: nn.Module | Sequence[nn.Module] = (),
    scalars: Collection[int | str] | None = None,
    backward: Callable[[Tensor], object] = Tensor.backward,
    group: GroupLike = None,
) -> Tensor:
    """Do what ``loss(encode(batch)).backward()`` does, with the activations of one micro-batch.

        1. encode each micro-batch without a graph         [ a ] [ b ] [ c ]
        2. the loss of all embeddings, of all ranks        loss(a b c)  --->  A B C
        3. encode each again, with its gradient            [ a ] <- A   [ b ] <- B   [ c ] <- C

    ``encode`` returns a tensor, or a tuple, list or dict of tensors and numbers, which become the
    arguments of ``loss``. Embeddings are joined along dim 0. Scalars such as a learned scale are taken from the
    last micro-batch: ``scalars`` tells which outputs they are, by position or name. If None, they are
    tensors without dimensions, or of one element where the embeddings have another number of rows.

    ``models`` are the modules that ``encode`` calls (``encode`` itself is recognised). DDP modules
    synchronise their gradients once, in the last micro-batch, also those of parameters that only
    ``loss`` uses. Buffers are set back before step 3, so that the statistics of batch norm move once,
    and random numbers are replayed, so that step 3 has the same dropout as step 1. Layers that depend
    on the whole batch, such as batch norm, see single micro-batches.

    Ranks may have different numbers of micro-batches of any sizes, but each needs at least one, which
    may be empty. A rank with fewer than others encodes its last one again, with a gradient of zero
    and without a trace, before the others, so that every rank runs the collectives of FSDP, and of
    ``encode`` itself, equally often. ``group`` is the group of the loss; its ranks first exchange their numbers of micro-batches, so that a rank
    without any raises on all.

    ``backward`` runs the backward of step 2; with a gradient scaler it is
    ``lambda loss: scaler.scale(loss).backward()``. Gradients are added to ``.grad``. The loss is
    returned without a graph.

    Cost: one more forward of the encoder, one copy of the buffers, and one size exchange.
    """
    models = (models,) if isinstance(models, nn.Module) else models
    called = (encode, *models)
    modules = [m for m in called if isinstance(m, nn.Module)]
    micro_batches = _listed(micro_batches, modules, group)
    most = _most_micro_batches(len(micro_batches), modules, group)
    extra = most - len(micro_batches)
    wrapped = [m for m in called if hasattr(m, "no_sync")]
    _check_modes(wrapped, group)
    for module in wrapped:
        sync_ddp_buffers(module)
    devices = random_devices()
    with torch.no_grad(), _no_sync(wrapped):
        extra_states = _encode_beside(encode, micro_batches[-1], extra, modules, devices)
        with kept_buffers(modules):
            states, outputs = _encode_all(encode, micro_batches, devices, group)

    first = outputs[0]
    is_scalar = find_scalars(outputs) if scalars is None else _named_scalars(first, scalars, group)
    _check_embeddings(outputs, is_scalar, group)
    joined = join(outputs, is_scalar)
    value = joined.call(loss)
    _check_loss(value, backward, group)
    is_trained = uses_others(value, joined.tensors)
    with LossParameters(wrapped) as parameters:
        backward(value)
    gradients = split_gradients(joined, outputs, is_scalar)

    last = len(micro_batches) - 1
    with torch.random.fork_rng(devices):
        # Not at the end: gradients are synchronised there, on all ranks in the same pass.
        with _no_sync(wrapped):
            for state in extra_states:
                set_random_state(devices, state)
                none = [None if g is None else torch.zeros_like(g) for g in gradients[last]]
                with kept_buffers(modules):
                    _encoded(encode(micro_batches[-1]), group, first).backward(none)
        for number, batch in enumerate(micro_batches):
            with _no_sync(wrapped if number < last else []):
                set_random_state(devices, states[number])
                again = _encoded(encode(batch), group, first)
                is_trained |= any(x.requires_grad for x in again.tensors)
                if number < last:
                    again.backward(gradients[number])
                else:
                    found = parameters.complete(again.tensors, gradients[last])
                    again.backward(found, parameters.zeros())
    # A rank of which all micro-batches are empty may encode them as it likes.
    pairs = zip(joined.tensors, is_scalar, strict=True)
    if not is_trained and any(len(x) for x, scalar in pairs if not scalar):
        rule = "no output of encode requires grad, and the loss depends on nothing else that does."
        _refuse(
            rule, "Let encode keep its graph: without no_grad, inference_mode and detach.", group
        )
    return value.detach()


def _encode_beside(
    encode: Callable[[Batch], Any],
    batch: Batch,
    times: int,
    modules: Sequence[nn.Module],
    devices: Sequence[int],
) -> list[list[Tensor]]:
    """Encode a batch for the sake of other ranks; the states of random numbers before each time.

    In step 1 before the others too: collectives in ``encode`` join the same micro-batches of all ranks in both
    (test_collectives_of_the_encoder_join_the_same_micro_batches_twice).
    """
    states = []
    with torch.random.fork_rng(devices):
        for _ in range(times):
            states.append(random_state(devices))
            with kept_buffers(modules):
                encode(batch)
    return states


def _encode_all(
    encode: Callable[[Batch], Any],
    micro_batches: Sequence[Batch],
    devices: Sequence[int],
    group: GroupLike,
) -> tuple[list[list[Tensor]], list[Output]]:
    """The states of random numbers before each encoding, and what it gives."""
    states: list[list[Tensor]] = []
    outputs: list[Output] = []
    for batch in micro_batches:
        states.append(random_state(devices))
        outputs.append(_encoded(encode(batch), group, *outputs[:1]))
    return states, outputs


def _listed(
    micro_batches: Iterable[Batch], modules: Sequence[nn.Module], group: GroupLike
) -> list[Batch]:
    try:
        return list(_iterated(micro_batches))
    except Exception:
        # The others learn of it from the numbers, which are their first message. Not of an interrupt,
        # which must not wait for them.
        with suppress(AllgradError):
            _most_micro_batches(0, modules, group)
        raise


def _iterated(micro_batches: Iterable[Batch]) -> Iterator[Batch]:
    rule = f"grad_cache_step: micro_batches is a {type(micro_batches).__name__}."
    wrong = InputError(f"{rule}\nGive a list of batches, of one too, or an iterator of them.")
    if isinstance(
        micro_batches, Mapping
    ):  # a batch: of its names there would be an error in encode
        raise wrong
    try:
        return iter(micro_batches)
    except TypeError:
        raise wrong from None


def _most_micro_batches(count: int, modules: Sequence[nn.Module], group: GroupLike) -> int:
    """The largest number of micro-batches of any rank."""
    # An NCCL group cannot carry CPU tensors, and the current device may be that of another rank.
    current = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    device = next((p.device for m in modules for p in m.parameters()), current)
    device = resolve("grad_cache_step", group).group.message_device(device)
    counts: tuple[int, ...] = gather_sizes(torch.empty(count, 0, device=device), group=group)
    if all(counts):
        return max(counts)
    raise InputError(
        rank_table(
            "grad_cache_step: each rank needs a micro-batch.",
            [f"{count} micro-batches" for count in counts],
            {rank: "no micro-batch" for rank, count in enumerate(counts) if not count},
            "Give each rank at least one; it may be empty.",
        )
    )


def _encoded(returned: Any, group: GroupLike, first: Output | None = None) -> Output:
    """The output of an encoder, if it is one; its names in the order of the first one."""
    named = returned if isinstance(returned, dict) else {}
    if not isinstance(returned, (Tensor, tuple, list, dict)):
        _refuse(f"encode returned {type(returned).__name__}.", _OUTPUTS, group)
    if isinstance(returned, (tuple, list)):
        named = dict(enumerate(returned))
    for name, x in named.items():
        if not isinstance(x, (Tensor, Real)):
            _refuse(f"output {name!r} of encode is {type(x).__name__}.", _OUTPUTS, group)
    output = Output(returned)
    if first is None or first.is_like(output):
        return output
    if first.names is None or output.names is None or {*first.names} != {*output.names}:
        found = f"encode returned {output} for one micro-batch, {first} for the first."
        _refuse(found, "Return the same outputs for each, in any order if they have names.", group)
    return Output({name: returned[name] for name in first.names})


_OUTPUTS = "Return a tensor, or a tuple, list or dict of tensors and numbers."


def _refuse(rule: str, advice: str, group: GroupLike) -> NoReturn:
    """Raise; the other ranks end their wait after some seconds, in checked mode at once."""
    error = InputError(f"grad_cache_step: {rule}\n{advice}")
    ended_ranks.publish(error)
    refuse(resolve("grad_cache_step", group), error)


def _check_modes(wrapped: Sequence[Any], group: GroupLike) -> None:
    if not torch.is_grad_enabled():
        _refuse("grad mode is off.", "Call it outside of torch.no_grad().", group)
    active = active_ddp_module()
    if active is not None and active.require_backward_grad_sync:
        rule = "it is called inside the forward of a DDP module, as Lightning calls training_step."
        advice = "Call it within that module's no_sync(), and average the gradients over the ranks after it."
        _refuse(rule, advice, group)
    if any(getattr(m, "static_graph", False) for m in wrapped):
        rule = "DDP with static_graph=True takes one backward in each step."
        _refuse(rule, "Leave out static_graph=True.", group)


def _check_loss(value: object, backward: object, group: GroupLike) -> None:
    if not isinstance(value, Tensor):
        rule = f"loss returned {type(value).__name__}, not a tensor."
        _refuse(rule, "Return the loss alone.", group)
    if value.numel() != 1 and backward is Tensor.backward:
        rule = f"loss returned a tensor of shape {tuple(value.shape)}."
        _refuse(rule, "Return one number, or give a backward= that takes the tensor.", group)


def _named_scalars(output: Output, scalars: Collection[int | str], group: GroupLike) -> list[bool]:
    if not isinstance(scalars, Collection) or isinstance(scalars, str):
        given = type(scalars).__name__
        _refuse(f"scalars is {given}.", "Give a list of positions or names, or None.", group)
    names = range(len(output.tensors)) if output.names is None else output.names
    unknown = [name for name in scalars if name not in names]
    if unknown:
        _refuse(
            f"there is no output {unknown[0]!r}.", f"Give scalars= some of {list(names)}.", group
        )
    return [name in scalars for name in names]


def _check_embeddings(
    outputs: Sequence[Output], is_scalar: Sequence[bool], group: GroupLike
) -> None:
    """Raise unless embeddings differ between micro-batches in dim 0 only."""
    first = outputs[0]
    names = first.names or range(len(first.tensors))
    for name, scalar, *found in zip(
        names, is_scalar, *(output.tensors for output in outputs), strict=True
    ):
        for x in () if scalar else found:
            if not x.dim():
                rule = f"output {name!r} of encode has no rows to join."
                _refuse(rule, "Return (rows, ...), or name it in scalars=.", group)
            if x.shape[1:] != found[0].shape[1:] or x.device != found[0].device:
                one, other = (f"{tuple(x.shape)} on {x.device}" for x in (x, found[0]))
                rule = f"output {name!r} of encode is {one} for one micro-batch, {other} for the first."
                _refuse(rule, "Return the same for each; the number of rows may differ.", group)


@contextmanager
def _no_sync(wrapped: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in wrapped:
            stack.enter_context(module.no_sync())
        yield
