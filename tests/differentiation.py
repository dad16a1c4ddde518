"""Every way to differentiate a function that goes through a collective, and what it must give.

The function takes four numbers to three on each rank, whatever the pieces' sizes in between, so
that every transform has the same shapes on every rank:

    rank r   v  --->  x = P[r] sin(v)  --->  y = collective(x)  --->  M[r] y + N[r] cos(v)

One process that holds all ranks' numbers gives what each of them must get. Where a transform asks
for one basis vector after another, all ranks ask for theirs at once: ``jacrev`` adds up the ranks'
outputs, ``jacfwd`` the ranks' inputs.
"""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import torch
from torch import func
from torch.autograd import forward_ad

from exactness import random


class Through:
    """The function through one call, on one rank and in one process, with data to run it on."""

    def __init__(self, call, at):
        self.call, self.at = call, at
        self.mine = 0 if call.kind == "alike" else at.rank
        self.shapes = call.shapes(at.world)
        self.inputs = len(self.shapes)
        ys = call.results([torch.zeros(s) for s in self.shapes], at.world)
        once = call.kind == "same"
        seeds = [0 if once else r for r in range(at.world)]
        self.before = [random((prod(s), 4), 10 + k) for k, s in enumerate(self.shapes)]
        self.after = [random((3, y.numel()), 20 + s) for y, s in zip(ys, seeds, strict=True)]
        # A term beside the collective; not where all ranks are to do the same work.
        own = call.kind in {"each", "none"}
        self.beside = [random((3, 4), 30 + s) if own else torch.zeros(3, 4).double() for s in seeds]
        self.weights = [random((3,), 40 + s) for s in seeds]
        self.counted = slice(0, 1) if once else slice(None)  # whose losses add up
        self.values = random((self.inputs, 4), 50)
        self.tangents = random((self.inputs, 4), 51)
        self.cotangents = torch.stack([random((3,), 60 + s) for s in seeds])
        self.batch = random((2, 3, self.inputs, 4), 52)

    def data(self):
        """What this rank runs on."""
        return SimpleNamespace(
            v=self.values[self.mine],
            t=self.tangents[self.mine],
            u=self.cotangents[self.at.rank],
            batch=self.batch[:, :, self.mine],
        )

    def function(self, v):
        x = (self.before[self.mine] @ v.sin()).reshape(self.shapes[self.mine])
        y = self.call.run(self.at, x)
        return self.after[self.at.rank] @ y.flatten() + self.beside[self.at.rank] @ v.cos()

    def loss(self, out):
        return (self.weights[self.at.rank] * out.sin()).sum()

    def whole(self, base):
        """All ranks' outputs from all ranks' inputs, near ``base``."""
        constants = self._results(base) if self.call.kind == "none" else None

        def outputs(values):
            ys = constants or self._results(values)
            given = values.expand(self.at.world, 4) if self.call.kind == "alike" else values
            return torch.stack(
                [
                    after @ y.flatten() + beside @ v.cos()
                    for after, y, beside, v in zip(self.after, ys, self.beside, given, strict=True)
                ]
            )

        return outputs

    def total(self, outputs):
        """The losses that count, added up."""
        return (torch.stack(self.weights) * outputs.sin())[self.counted].sum()

    def objective(self, base):
        outputs = self.whole(base)
        return lambda values: self.total(outputs(values))

    def _results(self, values):
        xs = [
            (before @ v.sin()).reshape(shape)
            for before, v, shape in zip(self.before, values, self.shapes, strict=True)
        ]
        return self.call.results(xs, self.at.world)


def by_backward(f, loss, d):
    v = d.v.clone().requires_grad_()
    loss(f(v)).backward()
    return v.grad


def by_dual_numbers(f, loss, d):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(d.v, d.t))).tangent


class Weighted(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.register_buffer("weight", torch.zeros(4).double())
        self.f = f

    def forward(self):
        return self.f(self.weight)


def by_functional_call(f, loss, d):
    module = Weighted(lambda v: loss(f(v)))
    return func.grad(lambda p: func.functional_call(module, p, ()))({"weight": d.v})["weight"]


def by_grad_of_grad(f, loss, d):
    first = func.grad(lambda v: loss(f(v)))
    return func.grad(lambda v: first(v).sin().sum())(d.v)


# name: what a rank calls, from the function, the loss of its output, and the rank's data.
RANK = {
    "backward": by_backward,
    "grad": lambda f, loss, d: func.grad(lambda v: loss(f(v)))(d.v),
    "vjp": lambda f, _, d: func.vjp(f, d.v)[1](d.u)[0],
    "functional_call": by_functional_call,
    "jvp": lambda f, _, d: func.jvp(f, (d.v,), (d.t,))[1],
    "dual numbers": by_dual_numbers,
    "jacrev": lambda f, _, d: func.jacrev(f)(d.v),
    "jacfwd": lambda f, _, d: func.jacfwd(f)(d.v),
    "hessian": lambda f, loss, d: func.hessian(lambda v: loss(f(v)))(d.v),
    "jacrev(jacfwd)": lambda f, loss, d: func.jacrev(func.jacfwd(lambda v: loss(f(v))))(d.v),
    "grad(grad)": by_grad_of_grad,
    "grad(jvp)": lambda f, loss, d: func.grad(lambda v: loss(func.jvp(f, (v,), (d.t,))[1]))(d.v),
    "jvp(grad)": lambda f, loss, d: func.jvp(func.grad(lambda v: loss(f(v))), (d.v,), (d.t,))[1],
    "vmap": lambda f, _, d: func.vmap(f)(d.batch[0]),
    "vmap, in_dims=1": lambda f, _, d: func.vmap(f, in_dims=1)(d.batch[0].mT),
    "vmap, in_dims=-1": lambda f, _, d: func.vmap(f, in_dims=-1)(d.batch[0].mT),
    "vmap(vmap)": lambda f, _, d: func.vmap(func.vmap(f), in_dims=1, out_dims=1)(d.batch),
    "vmap(grad)": lambda f, loss, d: func.vmap(func.grad(lambda v: loss(f(v))))(d.batch[0]),
    "vmap(jvp)": lambda f, _, d: func.vmap(lambda v: func.jvp(f, (v,), (d.t,))[1])(d.batch[0]),
    "jvp(vmap)": lambda f, _, d: func.jvp(func.vmap(f), (d.batch[0],), (d.t.expand(3, 4),))[1],
    "grad(vmap)": lambda f, loss, d: func.grad(lambda b: loss(func.vmap(f)(b).sum(0)))(d.batch[0]),
}


def gradient(case, values):
    return func.grad(case.objective(values))(values)


def derivative(case, values):
    return func.jvp(case.whole(values), (values,), (case.tangents,))[1][case.at.rank]


def want_vjp(case):
    def paired(values):
        return (case.cotangents * case.whole(case.values)(values))[case.counted].sum()

    return func.grad(paired)(case.values)[case.mine]


def want_jacrev_of_jacfwd(case):
    outputs = case.whole(case.values)
    weights = torch.stack(case.weights)

    def slopes(values):  # of each rank's loss, all inputs moved at once
        return func.jacrev(lambda v: (weights * outputs(v).sin()).sum(1))(values).sum(1)

    return func.jacrev(slopes)(case.values)[case.counted, :, case.mine].sum(0)


def want_grad_of_grad(case):
    first = func.grad(case.objective(case.values))
    return func.grad(lambda values: first(values).sin().sum())(case.values)[case.mine]


def want_grad_of_jvp(case):
    outputs = case.whole(case.values)

    def of_tangents(values):
        return case.total(func.jvp(outputs, (values,), (case.tangents,))[1])

    return func.grad(of_tangents)(case.values)[case.mine]


def want_grad_of_vmap(case):
    def objective(batch):
        return case.total(sum(case.whole(b)(v) for b, v in zip(case.batch[0], batch, strict=True)))

    return func.grad(objective)(case.batch[0])[:, case.mine]


def each_of(batch, run):
    return torch.stack([run(values) for values in batch])


def want_values(case):
    return each_of(case.batch[0], lambda values: case.whole(values)(values)[case.at.rank])


def want_tangents(case):
    return each_of(case.batch[0], lambda values: derivative(case, values))


def want_gradient(case):
    return gradient(case, case.values)[case.mine]


# name: the same from one process.
WANTED = {
    "backward": want_gradient,
    "grad": want_gradient,
    "vjp": want_vjp,
    "functional_call": want_gradient,
    "jvp": lambda case: derivative(case, case.values),
    "dual numbers": lambda case: derivative(case, case.values),
    "jacrev": lambda case: func.jacrev(case.whole(case.values))(case.values)[
        case.counted, :, case.mine
    ].sum(0),
    "jacfwd": lambda case: func.jacrev(case.whole(case.values))(case.values)[case.at.rank].sum(1),
    "hessian": lambda case: func.hessian(case.objective(case.values))(case.values)[case.mine].sum(
        1
    ),
    "jacrev(jacfwd)": want_jacrev_of_jacfwd,
    "grad(grad)": want_grad_of_grad,
    "grad(jvp)": want_grad_of_jvp,
    "jvp(grad)": lambda case: func.jvp(
        func.grad(case.objective(case.values)), (case.values,), (case.tangents,)
    )[1][case.mine],
    "vmap": want_values,
    "vmap, in_dims=1": want_values,
    "vmap, in_dims=-1": want_values,
    "vmap(vmap)": lambda case: each_of(
        case.batch,
        lambda row: each_of(row, lambda values: case.whole(values)(values)[case.at.rank]),
    ),
    "vmap(grad)": lambda case: each_of(
        case.batch[0], lambda values: gradient(case, values)[case.mine]
    ),
    "vmap(jvp)": want_tangents,
    "jvp(vmap)": want_tangents,
    "grad(vmap)": want_grad_of_vmap,
}
MODES = tuple(RANK)
