"""Compare a call on real ranks with one process holding all pieces: values and two derivatives.

Runs inside a rank. Every rank makes all ranks' pieces from one seed, works out what one process
would get from them, and compares its own part.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from places import process_group

RTOL = 1e-12
ATOL = 1e-13

GRADIENT_LAYOUTS = ("transposed", "expanded", "slice")
SIZES = {"equal": (2, 2, 2, 2), "ragged": (2, 1, 3, 4), "empty": (2, 0, 3, 1)}


def place(group=None):
    """This process's rank and the number of ranks."""
    if not dist.is_initialized():
        return 0, 1
    found = process_group(group)
    return dist.get_rank(found), dist.get_world_size(found)


def random(shape, seed, dtype=torch.float64):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if dtype.is_complex:
        other = random(shape, seed + 7919)
        return torch.complex(made, other).to(dtype)
    return made.to(dtype)


def pieces(shapes, dtype=torch.float64, seed=0):
    return [random(shape, seed * 101 + r, dtype) for r, shape in enumerate(shapes)]


def ragged_shapes(world, kind, dim, ndim=3):
    """One shape for each rank: other dims alike, ``dim`` as the kind says."""
    base = [2, 3, 2][:ndim]
    return [(*base[:dim], SIZES[kind][r], *base[dim + 1 :]) for r in range(world)]


def with_layouts(*layouts):
    """Layouts of the input; the gradient's layouts go with the first of them only."""
    yield layouts[0], GRADIENT_LAYOUTS
    for layout in layouts[1:]:
        yield layout, ()


def leaf(x, layout="contiguous"):
    return laid_out(x.detach(), layout).detach().requires_grad_()


def laid_out(x, layout):
    """The same numbers in other strides."""
    if layout == "contiguous":
        return x.clone(memory_format=torch.contiguous_format)
    if layout == "transposed":
        order = list(reversed(range(x.dim())))
        return x.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
    if layout == "slice":
        wide = x.new_zeros([2 * n + 1 for n in x.shape])
        view = wide[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
        return view.copy_(x)
    assert layout == "expanded"
    return x.flatten()[:1].sum().expand(x.shape)


def loss(y, weights_seed):
    """A loss whose derivatives of every order depend on the value and on the seed."""
    w = random(y.shape, 5000 + weights_seed)
    if y.is_complex():
        return (w * y.real.sin()).sum() + (w * y.imag.cos()).sum()
    return (w * y.sin()).sum()


def grads(total, leaves, *, graph=False):
    if not total.requires_grad:  # nothing reached it
        return [torch.zeros_like(x, requires_grad=graph) for x in leaves]
    found = torch.autograd.grad(
        total, leaves, create_graph=graph, allow_unused=True, materialize_grads=True
    )
    return list(found)


def same(got, want, what):
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    torch.testing.assert_close(
        got, want, rtol=RTOL, atol=ATOL, msg=lambda m: f"{what} is not exact.\n{m}"
    )


def check_exact(
    run,
    reference,
    inputs,
    *,
    group=None,
    layout="contiguous",
    first="each",
    second="each",
    gradient_layouts=GRADIENT_LAYOUTS,
):
    """``run(x)`` on this rank against ``reference(all inputs)`` in one process.

    first, second: whether in that order of derivative each rank's loss is its own and all are
    added up ("each"), or all ranks have the same loss and it counts once ("once").
    A single input means a value that all ranks hold alike.
    """
    rank, world = place(group)
    alike = len(inputs) == 1 and world > 1
    mine = 0 if alike else rank

    def total(ys, how, seed):
        seeds = [seed + r if how == "each" else seed for r in range(len(ys))]
        losses = [loss(y, s) for y, s in zip(ys, seeds, strict=True)]
        return losses[0] if how == "once" else sum(losses)

    leaves = [leaf(x, layout) for x in inputs]
    wanted = reference(leaves)
    want_first = grads(total(wanted, first, 0), leaves, graph=True)
    want_second = grads(total(want_first, second, 50), leaves)

    x = leaf(inputs[mine], layout)
    before = x.detach().clone()
    y = run(x)
    assert y.requires_grad
    assert y.is_contiguous() or y._is_view()
    same(y.detach(), wanted[rank].detach(), "the value")
    (got_first,) = grads(loss(y, 0 if first == "once" else rank), [x], graph=True)
    same(got_first.detach(), want_first[mine].detach(), "the first derivative")
    assert got_first.requires_grad
    (got_second,) = grads(loss(got_first, 50 if second == "once" else 50 + rank), [x])
    same(got_second, want_second[mine], "the second derivative")
    assert torch.equal(x.detach(), before), "the input was changed"

    for strides in gradient_layouts:
        upstream = [
            laid_out(random(w.shape, 900 + (0 if first == "once" else r), w.dtype), strides)
            if w.numel()
            else torch.zeros_like(w)
            for r, w in enumerate(wanted)
        ]
        ys = reference(leaves)
        summed = [
            (w.conj() * u).real.sum() if w.is_complex() else (w * u).sum()
            for w, u in zip(ys, upstream, strict=True)
        ]
        want = grads(summed[0] if first == "once" else sum(summed), leaves)
        x = leaf(inputs[mine], layout)
        (got,) = torch.autograd.grad(run(x), x, upstream[rank])
        same(got, want[mine], f"the derivative for a gradient that is {strides}")
