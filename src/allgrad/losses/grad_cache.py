"""Gradient caching: train on a batch whose activations do not fit into memory at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack, contextmanager, suppress
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from allgrad._core.module_internals import active_ddp_module, own_buffers
from allgrad._wire import ended_ranks
from allgrad._wire.calls import resolve
from allgrad._wire.consistency import refuse
from allgrad.collectives.all_gather import gather_sizes
from allgrad.errors import AllgradError, InputError, rank_table
from allgrad.losses._arguments.feature_checks import number
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
    and without a trace, so that every rank runs the collectives of FSDP equally often. ``group`` is
    the group of the loss; its ranks first exchange their numbers of micro-batches, so that a rank
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
    buffers = _Buffers(modules)
    devices = _devices()
    states: list[list[Tensor]] = []
    outputs: list[_Output] = []
    with torch.no_grad(), _no_sync(wrapped):
        for batch in micro_batches:
            states.append(_random_state(devices))
            outputs.append(_encoded(encode(batch), group, *outputs[:1]))
        with torch.random.fork_rng(devices):
            for _ in range(extra):
                encode(micro_batches[-1])
    buffers.restore()

    first = outputs[0]
    is_scalar = _find_scalars(outputs) if scalars is None else _named_scalars(first, scalars, group)
    _check_embeddings(outputs, is_scalar, group)
    joined = _join(outputs, is_scalar)
    value = joined.call(loss)
    _check_loss(value, backward, group)
    is_trained = uses_others(value, joined.tensors)
    with LossParameters(wrapped) as parameters:
        backward(value)
    gradients = _split_gradients(joined, outputs, is_scalar)

    last = len(micro_batches) - 1
    if extra:  # the loss may have changed them, a queue of keys for one
        buffers = _Buffers(modules)
    with torch.random.fork_rng(devices):
        # Not at the end: gradients are synchronised there, on all ranks in the same pass.
        with _no_sync(wrapped):
            for _ in range(extra):
                none = [None if g is None else torch.zeros_like(g) for g in gradients[last]]
                _encoded(encode(micro_batches[-1]), group, first).backward(none)
                buffers.restore()
        for number, batch in enumerate(micro_batches):
            with _no_sync(wrapped if number < last else []):
                _set_random_state(devices, states[number])
                again = _encoded(encode(batch), group, first)
                is_trained |= any(x.requires_grad for x in again.tensors)
                if number < last:
                    again.backward(gradients[number])
                else:
                    found = parameters.complete(again.tensors, gradients[last])
                    again.backward(found, parameters.zeros())
    # A rank of which all micro-batches are empty may encode them as it likes.
    if not is_trained and any(joined.rows()):
        rule = "no output of encode requires grad, and the loss depends on nothing else that does."
        _refuse(
            rule, "Let encode keep its graph: without no_grad, inference_mode and detach.", group
        )
    return value.detach()


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


def _encoded(returned: Any, group: GroupLike, first: _Output | None = None) -> _Output:
    """The output of an encoder, if it is one; its names in the order of the first one."""
    named = returned if isinstance(returned, dict) else {}
    if not isinstance(returned, (Tensor, tuple, list, dict)):
        _refuse(f"encode returned {type(returned).__name__}.", _OUTPUTS, group)
    if isinstance(returned, (tuple, list)):
        named = dict(enumerate(returned))
    for name, x in named.items():
        if not isinstance(x, (Tensor, Real)):
            _refuse(f"output {name!r} of encode is {type(x).__name__}.", _OUTPUTS, group)
    output = _Output(returned)
    if first is None or first.is_like(output):
        return output
    if first.names is None or output.names is None or {*first.names} != {*output.names}:
        found = f"encode returned {output} for one micro-batch, {first} for the first."
        _refuse(found, "Return the same outputs for each, in any order if they have names.", group)
    return _Output({name: returned[name] for name in first.names})


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


class _Buffers:
    """The buffers of modules as they were."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = {owner: None for module in modules for owner in module.modules()}
        self.named = [(owner, own_buffers(owner)) for owner in owners]
        buffers = {id(b): b for _, named in self.named for b in named.values() if b is not None}
        self.values = [(b, b.detach().clone()) for b in buffers.values() if _can_change(b)]

    def restore(self) -> None:
        for owner, named in self.named:
            for name in own_buffers(owner).keys() - named.keys():
                delattr(owner, name)
            for name, buffer in named.items():
                setattr(owner, name, buffer)
        for buffer, value in self.values:
            # As data: a graph that needs this buffer need not know that it changed and is as it was.
            buffer.data.copy_(value)


def _can_change(buffer: Tensor) -> bool:
    """Whether torch would write to it here: not if its elements share memory, or it is of inference mode."""
    if buffer.is_inference():
        return False
    if buffer.layout is not torch.strided:
        return True
    lengths = zip(buffer.shape, buffer.stride(), strict=True)
    return all(stride or length <= 1 for length, stride in lengths)


class _Output:
    """What the encoder returned: its tensors, and their names if it was a dict."""

    def __init__(self, returned: Any) -> None:
        self.names = list(returned) if isinstance(returned, dict) else None
        values = returned.values() if isinstance(returned, dict) else returned
        listed = [values] if isinstance(values, Tensor) else list(values)
        # A number is a scalar without a gradient.
        self.tensors: list[Tensor] = [number(x) for x in listed]

    def __str__(self) -> str:
        if self.names is not None:
            return ", ".join(map(repr, self.names))
        count = len(self.tensors)
        return f"{count} output{'' if count == 1 else 's'}"

    def is_like(self, other: _Output) -> bool:
        return self.names == other.names and len(self.tensors) == len(other.tensors)

    def rows(self) -> set[int]:
        """The lengths of the embeddings: of all tensors that are surely not scalars."""
        return {len(x) for x in self.tensors if x.dim() > 1 and x.numel() != 1}

    def call(self, loss: Callable[..., Tensor]) -> Tensor:
        if self.names is None:
            return loss(*self.tensors)
        return loss(**dict(zip(self.names, self.tensors, strict=True)))

    def backward(
        self, gradients: Sequence[Tensor | None], more: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """Run backward from the outputs with these gradients, and from ``more`` tensors with theirs."""
        pairs = [
            (x, g)
            for x, g in zip(self.tensors, gradients, strict=True)
            if g is not None and x.requires_grad
        ]
        pairs += more
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


def _find_scalars(outputs: Sequence[_Output]) -> list[bool]:
    """Whether each tensor that the encoder returns is a scalar.

    A tensor of shape (1,) may also hold one value per row, as labels do. It is a scalar if the
    embeddings of some micro-batch have another number of rows.
    """
    other_rows = any(rows and 1 not in rows for rows in (output.rows() for output in outputs))
    return [
        all(x.dim() == 0 or (x.numel() == 1 and other_rows) for x in tensors)
        for tensors in zip(*(output.tensors for output in outputs), strict=True)
    ]


def _named_scalars(output: _Output, scalars: Collection[int | str], group: GroupLike) -> list[bool]:
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
    outputs: Sequence[_Output], is_scalar: Sequence[bool], group: GroupLike
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


def _join(outputs: Sequence[_Output], is_scalar: Sequence[bool]) -> _Output:
    """All outputs as one, with leaf tensors: embeddings joined, scalars of the last micro-batch."""
    last = outputs[-1]
    joined = [
        x.clone() if scalar else torch.cat([output.tensors[i] for output in outputs])
        for i, (x, scalar) in enumerate(zip(last.tensors, is_scalar, strict=True))
    ]
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in joined]
    return _Output(leaves if last.names is None else dict(zip(last.names, leaves, strict=True)))


def _split_gradients(
    joined: _Output, outputs: Sequence[_Output], is_scalar: Sequence[bool]
) -> list[list[Tensor | None]]:
    """The gradients of each micro-batch's output; the last one gets those of scalars."""
    by_tensor: list[Sequence[Tensor | None]] = []
    for i, (x, scalar) in enumerate(zip(joined.tensors, is_scalar, strict=True)):
        if x.grad is None:
            by_tensor.append([None] * len(outputs))
        elif scalar:
            by_tensor.append([torch.zeros_like(x)] * (len(outputs) - 1) + [x.grad])
        else:
            by_tensor.append(list(x.grad.split([len(output.tensors[i]) for output in outputs])))
    return [list(gradients) for gradients in zip(*by_tensor, strict=True)]


@contextmanager
def _no_sync(wrapped: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in wrapped:
            stack.enter_context(module.no_sync())
        yield


def _devices() -> list[int]:
    """The CUDA devices whose random numbers an encoder may use."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def _random_state(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]


def _set_random_state(devices: Sequence[int], states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)
