"""One process, several devices: values and two derivatives against plain torch, exactly."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from allgrad import devices
from allgrad.devices._adjoint_pairs import copy_pair, join_pair
from allgrad.devices._arguments import check_devices

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
everywhere = pytest.mark.parametrize(
    "targets",
    [
        pytest.param(["cpu", "cpu", "cpu"], id="cpu"),
        pytest.param(["cuda:0", "cpu", 0], id="cuda", marks=needs_cuda),
    ],
)
homes = pytest.mark.parametrize("home", ["cpu", pytest.param("cuda:0", marks=needs_cuda)])
layouts = pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice"])
CPUS = ["cpu", "cpu", "cpu"]


def random(*shape, seed=0, dtype=torch.float64):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made, dtype=dtype)


def laid_out(x, layout):
    """The same numbers with other strides."""
    if layout == "transposed":
        return x.mT.clone(memory_format=torch.contiguous_format).mT
    if layout == "slice":
        return torch.stack([x, x + 1], -1)[..., 0]
    if layout == "expanded":
        return x.flatten()[:1].sum().expand(x.shape)
    return x.clone()


def leaf(x, home="cpu", layout="contiguous"):
    return laid_out(x.to(home), layout).detach().requires_grad_()


def loss(ys, seed):
    """Derivatives of every order depend on the value, the output and the seed."""
    total = 0
    for i, result in enumerate(ys):
        y = result.cpu()
        weights = torch.arange(seed + i, seed + i + y.numel(), dtype=torch.float64).cos()
        total = total + (weights.view(y.shape) * y.sin()).sum()
    return total


def same(got, want):
    assert got.shape == want.shape
    torch.testing.assert_close(got.detach().cpu(), want.detach().cpu(), rtol=1e-12, atol=1e-13)


def check_exact(run, reference, inputs, upstream_layouts=("transposed", "expanded")):
    """``run(inputs)`` against ``reference(inputs)``: tensors in, a list of tensors out."""
    plain = [x.detach().cpu().requires_grad_() for x in inputs]
    before = [x.detach().clone() for x in inputs]
    ys, wanted = run(inputs), reference(plain)
    assert len(ys) == len(wanted)
    memory = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
    for y, want in zip(ys, wanted, strict=True):
        assert y.requires_grad
        assert y.is_contiguous()
        assert y.untyped_storage().data_ptr() not in memory or not y.numel()
        memory.add(y.untyped_storage().data_ptr())
        same(y, want)
    first = torch.autograd.grad(loss(ys, 10), inputs, create_graph=True)
    want_first = torch.autograd.grad(loss(wanted, 10), plain, create_graph=True)
    second = torch.autograd.grad(loss(first, 20), inputs)
    want_second = torch.autograd.grad(loss(want_first, 20), plain)
    for got, want, x in zip(first + second, want_first + want_second, inputs * 2, strict=True):
        same(got, want)
        assert got.device == x.device
    for layout in upstream_layouts:
        up = [laid_out(random(*y.shape, seed=i, dtype=y.dtype), layout) for i, y in enumerate(ys)]
        got = torch.autograd.grad(
            run(inputs), inputs, [u.to(y.device) for u, y in zip(up, ys, strict=True)]
        )
        for one, want in zip(got, torch.autograd.grad(reference(plain), plain, up), strict=True):
            same(one, want)
    assert all(torch.equal(x.detach(), old) for x, old in zip(inputs, before, strict=True))


# Values and derivatives.


@everywhere
@homes
@layouts
def test_broadcast_copies_and_its_gradient_sums(targets, home, layout):
    inputs = [leaf(random(3, 4), home, layout), leaf(random(2, 5, seed=1), home, layout)]
    check_exact(
        lambda xs: [x for copies in devices.broadcast(xs, targets) for x in copies],
        lambda xs: [x.clone() for _ in targets for x in xs],
        inputs,
    )


@everywhere
@homes
@layouts
def test_reduce_add_sums_and_its_gradient_copies(targets, home, layout):
    inputs = [
        leaf(random(3, 4, seed=i), device, layout) for i, device in enumerate(targets) for _ in "ab"
    ]
    check_exact(
        lambda xs: devices.reduce_add([xs[:2], xs[2:4], xs[4:]], home),
        lambda xs: [xs[0] + xs[2] + xs[4], xs[1] + xs[3] + xs[5]],
        inputs,
    )


@everywhere
@homes
@layouts
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("sizes", [None, (1, 0, 6), (0, 0, 7), (2, 4, 1)])
def test_scatter_splits_and_its_gradient_joins(targets, home, layout, dim, sizes):
    shape = [2, 3, 5]
    shape[dim] = 7
    check_exact(
        lambda xs: devices.scatter(xs[0], targets, sizes=sizes, dim=dim),
        lambda xs: [part.clone() for part in xs[0].split(sizes or (3, 2, 2), dim)],
        [leaf(random(*shape), home, layout)],
        upstream_layouts=() if sizes and 0 in sizes else ("transposed", "expanded"),
    )


@everywhere
@homes
@layouts
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 0, 6), (2, 4, 1)])
def test_gather_joins_and_its_gradient_splits(targets, home, layout, dim, sizes):
    shapes = [[2, 3, 5] for _ in sizes]
    for shape, size in zip(shapes, sizes, strict=True):
        shape[dim] = size
    inputs = [
        leaf(random(*shape, seed=i), device, layout)
        for i, (shape, device) in enumerate(zip(shapes, targets, strict=True))
    ]
    check_exact(
        lambda xs: [devices.gather(xs, home, dim=dim)], lambda xs: [torch.cat(xs, dim)], inputs
    )


@everywhere
@homes
@pytest.mark.parametrize("dim", [0, -1])
def test_gather_of_scalars_is_a_vector(targets, home, dim):
    inputs = [leaf(random(seed=i), device) for i, device in enumerate(targets)]
    check_exact(
        lambda xs: [devices.gather(xs, home, dim=dim)],
        lambda xs: [torch.stack(xs)],
        inputs,
        upstream_layouts=("expanded",),
    )


def test_scatter_of_a_scalar_is_a_vector_of_one():
    pieces = devices.scatter(torch.tensor(3.0), CPUS)
    assert [piece.tolist() for piece in pieces] == [[3.0], [], []]


@everywhere
@pytest.mark.parametrize("dtype", [torch.complex128, torch.float32, torch.bfloat16])
def test_other_dtypes_stay_as_they_are(targets, dtype):
    x = random(7, 2).to(dtype)
    x = (x * (1 + 2j)).conj().requires_grad_() if dtype.is_complex else x.requires_grad_()
    pieces = devices.scatter(x, targets)
    assert all(piece.dtype == dtype and not piece.is_conj() for piece in pieces)
    joined = devices.gather(pieces, "cpu")
    assert torch.equal(joined, x.resolve_conj())
    (gradient,) = torch.autograd.grad(joined, x, x.detach())
    assert torch.equal(gradient.resolve_conj(), x.detach().resolve_conj())
    added = devices.reduce_add(devices.broadcast(x, targets), "cpu")
    assert torch.equal(added, x + x + x)


@everywhere
def test_each_pair_is_adjoint(targets):
    targets = check_devices("test", targets)
    cpu = torch.device("cpu")
    pieces = [random(n, 3, seed=n).to(p) for n, p in zip((2, 0, 4), targets, strict=True)]
    copies = [random(2, 3, seed=i).to(p) for i, p in enumerate(targets)]
    for pair, xs, ys in [
        (join_pair(cpu, targets, (2, 0, 4), 0), pieces, [random(6, 3, seed=9)]),
        (copy_pair([cpu], [[p] for p in targets]), [random(2, 3, seed=9)], copies),
    ]:
        there = zip(pair.forward(xs), ys, strict=True)
        back = zip(xs, pair.adjoint.forward(ys), strict=True)
        left = sum((a * b).sum().cpu() for a, b in there)
        same(left, sum((a * b).sum().cpu() for a, b in back))


# Who requires grad.


@everywhere
def test_a_result_requires_grad_when_its_input_does(targets):
    nest = {
        "needs": torch.ones(2, requires_grad=True),
        "free": torch.ones(3),
        "whole": torch.arange(3),
        "flag": torch.tensor([True, False]),
    }
    for copy in devices.broadcast(nest, targets):
        assert {key for key, x in copy.items() if x.requires_grad} == {"needs"}
        assert torch.equal(copy["whole"].cpu(), nest["whole"])
        assert torch.equal(copy["flag"].cpu(), nest["flag"])
    groups = [[torch.ones(2, requires_grad=i == 1), torch.ones(2)] for i in range(3)]
    assert [x.requires_grad for x in devices.reduce_add(groups, targets[0])] == [True, False]
    assert not any(x.requires_grad for x in devices.scatter(nest["free"], targets))
    assert not devices.gather([nest["whole"]] * 3, targets[0]).requires_grad


def test_no_grad_is_kept():
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        assert not devices.broadcast(x, CPUS)[0].requires_grad
        assert not devices.scatter(x, CPUS)[0].requires_grad


def test_unused_copies_count_as_zero():
    x = leaf(random(3))
    used = devices.broadcast(x, CPUS)[1]
    (gradient,) = torch.autograd.grad((2 * used).sum(), x)
    assert gradient.tolist() == [2.0] * 3


# Results.


def test_copies_are_distinct_and_may_be_written_to():
    x, y = leaf(random(3)), leaf(random(3, seed=1))
    (a, b), (c, _) = devices.broadcast((x, y), ["cpu", "cpu"])
    squared = b * b
    a.mul_(3)
    assert torch.equal(a, 3 * x)
    assert torch.equal(c, x)
    (gradient,) = torch.autograd.grad(squared.sum() + a.sum() + c.sum(), x)
    assert gradient.tolist() == [4.0] * 3


def test_one_group_is_copied():
    x = torch.ones(3)
    (total,) = devices.reduce_add([[x]], "cpu")
    assert torch.equal(total, x)
    assert total.data_ptr() != x.data_ptr()
    joined = devices.gather([x], "cpu")
    assert joined.data_ptr() != x.data_ptr()


class Batch(NamedTuple):
    x: object
    label: object


@everywhere
def test_nests_keep_their_structure(targets):
    nest = Batch({"b": leaf(random(2)), "a": [leaf(random(3)), "name"]}, None)
    copies = devices.broadcast(nest, targets)
    assert len(copies) == 3
    for copy in copies:
        assert isinstance(copy, Batch)
        assert list(copy.x) == ["b", "a"]
        assert copy.x["a"][1] == "name"
        same(copy.x["b"], nest.x["b"])
    added = devices.reduce_add(copies, "cpu")
    same(added.x["a"][0], 3 * nest.x["a"][0])
    assert devices.broadcast([], targets) == [[], [], []]


@homes
def test_to_device_moves_what_is_elsewhere(home):
    x, whole = leaf(random(2, 3)), torch.arange(3)
    sparse = torch.eye(2, dtype=torch.float64).to_sparse()
    nest = {"x": x, "again": [x, whole], "sparse": sparse, "name": "n"}
    moved = devices.to_device(nest, home)
    kinds = {t.device.type for t in (moved["x"], moved["again"][1], moved["sparse"])}
    assert kinds == {torch.device(home).type}
    assert moved["x"] is moved["again"][0]
    assert moved["name"] == "n"
    assert moved["x"].requires_grad
    assert not moved["again"][1].requires_grad
    same(torch.autograd.grad(loss([moved["x"]], 3), x)[0], torch.autograd.grad(loss([x], 3), x)[0])


def test_to_device_does_not_copy_what_is_there():
    nest = {"x": torch.ones(2), "y": [torch.ones(3)]}
    assert devices.to_device(nest, "cpu:0") is nest


def test_to_another_kind_of_device():
    nest = [torch.ones(2, requires_grad=True), torch.ones(2, 3).T, torch.eye(2).to_sparse()]
    moved = devices.to_device(nest, "meta")
    assert [x.device.type for x in moved] == ["meta"] * 3
    assert [x.requires_grad for x in moved] == [True, False, False]
    assert [x.layout for x in moved] == [x.layout for x in nest]
    assert moved[1].shape == (3, 2)


def test_default_split_gives_the_first_devices_one_more():
    assert [len(x) for x in devices.scatter(torch.arange(11), ["cpu"] * 4)] == [3, 3, 3, 2]
    assert [len(x) for x in devices.scatter(torch.arange(2), CPUS)] == [1, 1, 0]


# torch.func and forward mode.


def through_everything(x, targets):
    """All four maps, each derivative reaching x."""
    pieces = devices.scatter(x, targets, sizes=(1, 4, 2), dim=0)
    joined = devices.gather([piece * (i + 1) for i, piece in enumerate(pieces)], "cpu")
    copies = devices.broadcast([joined, torch.arange(3)], targets)
    total = devices.reduce_add([copy[0].sin() * copy[1].sum() for copy in copies], "cpu")
    return loss([total], 5)


def in_plain_torch(x, _):
    joined = torch.cat([part * (i + 1) for i, part in enumerate(x.split((1, 4, 2)))])
    return loss([9 * joined.sin()], 5)


@everywhere
def test_torch_func_transforms_are_exact(targets):
    x, tangent = random(7, 2), random(7, 2, seed=1)
    for transform in (
        torch.func.grad,
        torch.func.hessian,
        lambda f: torch.func.jacfwd(torch.func.grad(f)),
        lambda f: lambda x, p: torch.func.jvp(lambda x: f(x, p), (x,), (tangent,))[1],
        lambda f: lambda x, p: torch.func.vmap(lambda x: f(x, p))(torch.stack([x, x + 1, x - 1])),
        lambda f: (
            lambda x, p: torch.func.vmap(torch.func.grad(lambda x: f(x, p)), in_dims=1, out_dims=1)(
                torch.stack([x, x + 1], 1)
            )
        ),
    ):
        same(transform(through_everything)(x, targets), transform(in_plain_torch)(x, targets))


@everywhere
def test_vmap_over_some_inputs_only(targets):
    x, fixed = random(4, 2, 3), random(2, 3, seed=1)
    got = torch.func.vmap(lambda x: devices.gather([x, fixed], "cpu", dim=-1))(x)
    same(got, torch.cat([x, fixed.expand(4, 2, 3)], -1))
    counted = torch.func.vmap(lambda i: devices.scatter(i, targets)[1].cpu())(
        torch.arange(8).view(2, 4)
    )
    assert counted.tolist() == [[2], [6]]


@everywhere
def test_gradcheck_of_every_order_and_mode(targets):
    x = leaf(random(7, 2))
    modes = {"check_forward_ad": True, "check_batched_grad": targets == CPUS}
    assert torch.autograd.gradcheck(lambda x: through_everything(x, targets), x, **modes)
    assert torch.autograd.gradgradcheck(lambda x: through_everything(x, targets), x)
