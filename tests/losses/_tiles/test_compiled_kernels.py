"""Every Triton kernel is compiled for a device, without one, as the host launches it.

So a mistake that Triton's interpreter does not see, such as a type that changes in a loop, is one here too.
"""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from allgrad.losses._kind import LossKind
from allgrad.losses._tiles.torch import Gradients, Weights

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from allgrad.losses._tiles import (  # noqa: E402
    fused,
    fused_kernels,
    fused_rows,
    kernels,
    launches,
    one_rank,
    row_kernels,
)
from allgrad.losses._tiles import triton as triton_tiles  # noqa: E402

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ROWS, WIDTH = 160, 96
SCALE = torch.tensor(9.0)


def type_of(x):
    if isinstance(x, TensorDescriptor):
        return f"tensordesc<{TYPES[x.base.dtype]}{list(x.block_shape)}>"
    if hasattr(x, "dtype"):
        return f"*{TYPES[x.dtype]}"
    return "i32" if isinstance(x, int) else "fp32"


def is_aligned(parameter, x):
    """Whether Triton compiles for a multiple of 16; the tensors here are all aligned."""
    if parameter.is_constexpr or isinstance(x, TensorDescriptor):
        return False
    if hasattr(x, "dtype"):
        return not parameter.do_not_specialize_on_alignment
    return isinstance(x, int) and x % 16 == 0 and not parameter.do_not_specialize


class Compiled:
    """A kernel that is compiled in place of every launch, once for each signature."""

    def __init__(self, kernel, found):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps=4, num_stages=3, enable_fp_fusion=True, **named):
        names = [p.name for p in self.kernel.params]
        given = dict(zip(names, args, strict=False)) | named
        constants = {p.name: given[p.name] for p in self.kernel.params if p.is_constexpr}
        signature = {n: "constexpr" if n in constants else type_of(given[n]) for n in names}
        key = self.kernel.__name__, str(signature), str(constants)
        if key not in self.found:
            aligned = {
                (i,): [["tt.divisibility", 16]]
                for i, p in enumerate(self.kernel.params)
                if is_aligned(p, given[p.name])
            }
            source = ASTSource(self.kernel, signature, constants, aligned)
            options = {
                "num_warps": num_warps,
                "num_stages": num_stages,
                "enable_fp_fusion": enable_fp_fusion,
            }
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            self.found[key] = made.asm["cubin"]


def product(a, b, out=None):
    return torch.mm(a.float(), b.float(), out=out)


@pytest.fixture
def found(monkeypatch):
    """What was compiled, by signature."""
    compiled = {}
    for module in (kernels, fused_kernels, row_kernels):
        for name, kernel in vars(module).copy().items():
            if isinstance(kernel, triton.runtime.jit.JITFunction) and name in module.__all__:
                monkeypatch.setattr(module, name, Compiled(kernel, compiled))
    monkeypatch.setattr(triton_tiles, "_add_product", lambda *_: None)
    monkeypatch.setattr(launches, "_compiled", {})
    for module in (fused, one_rank):
        monkeypatch.setattr(module, "dot_products", product)
        monkeypatch.setattr(module, "score_products", lambda q, k: product(q, k.T))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    plans = one_rank._softmax, one_rank._sigmoid, one_rank.gradients_plan
    for plan in plans:  # they hold kernels
        plan.cache_clear()
    yield compiled
    for plan in plans:
        plan.cache_clear()


def names(found):
    return {name for name, *_ in found}


def assert_in_registers(found, tmp_path):
    """A kernel that spills many registers is slower, and nobody notices."""
    for (name, *_), code in found.items():
        path = tmp_path / "kernel.cubin"
        path.write_bytes(code)
        command = TOOLS / "cuobjdump", "-res-usage", path
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (spilled,) = map(int, re.findall(r"STACK:(\d+)", shown))
        assert spilled <= 64, (name, shown)


def features(dtype):
    return torch.zeros(ROWS, WIDTH, dtype=dtype), torch.zeros(ROWS, WIDTH, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles(dtype, found, tmp_path):
    q, k = features(dtype)
    into = Gradients(torch.zeros(q.shape), [torch.zeros(k.shape)], *torch.zeros(3))
    lse, pairs = torch.zeros(ROWS), torch.zeros(ROWS)
    tiles = triton_tiles.TritonTiles(q, k, SCALE, first_pair=0)
    for kind, column_lse in ((LossKind.SOFTMAX_BOTH, lse), (LossKind.SOFTMAX_ROWS, None)):
        tiles.lse(kind)
        for smoothing in (0.0, 0.1):
            tiles.add_gradients(Weights(kind, lse, column_lse, smoothing, pairs), SCALE, into)
    tiles = triton_tiles.TritonTiles(q, k, SCALE, bias=SCALE, first_pair=0)
    tiles.softplus()
    tiles.add_gradients(Weights(LossKind.SIGMOID, None, None, 0.0, pairs), SCALE, into)
    triton_tiles.row_dots(q, k)
    assert names(found) == set(kernels.__all__)
    assert_in_registers(found, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kept_scores_and_one_rank_alone(dtype, found, tmp_path):
    q, k = features(dtype)
    dots, pairs, needed = q.float() @ k.T.float(), torch.zeros(ROWS), (True, True)
    numbers = {"first_pair": 0, "mean_factor": 0.1}
    for kind, column_lse in ((LossKind.SOFTMAX_BOTH, pairs), (LossKind.SOFTMAX_ROWS, None)):
        for alone in (True, False):
            fused.softmax_terms(kind, q, k, dots, SCALE, alone=alone, smoothing=0.0, **numbers)
        weights = Weights(kind, pairs, column_lse, 0.0, pairs)
        for by_loss in (None, SCALE):
            fused.softmax_weights(weights, dots, SCALE, dtype=dtype, by_loss=by_loss, **numbers)
    for bias in (None, SCALE):
        for needs_grad in needed:
            fused.sigmoid_terms(dots, SCALE, bias, dtype=dtype, needs_grad=needs_grad, **numbers)
    for kind in LossKind:
        bias = SCALE if kind is LossKind.SIGMOID else None
        for address in (None, torch.zeros((), dtype=torch.int64)):
            _, products = one_rank.loss_and_products(
                kind,
                *(q, k, SCALE, bias),
                smoothing=0.0,
                needs_query_grad=True,
                needs_key_grad=True,
                address=address,
            )
        one_rank.gradients(kind, q, k, SCALE, bias, SCALE, products)
    assert names(found) == set(fused_kernels.__all__) - {"copy_inputs"}
    assert_in_registers(found, tmp_path)


@pytest.mark.parametrize("columns", [160, 8192])
def test_whole_rows(columns, found, tmp_path):
    scores, mask = torch.zeros(16, columns), torch.ones(16, columns, dtype=torch.bool)
    for kind in ("pairs", "softmax", "sigmoid"):
        for weights in (None, torch.ones(columns)):
            fused_rows.losses_of_rows(kind, scores, mask, mask, weights)
    assert names(found) == set(row_kernels.__all__)
    assert_in_registers(found, tmp_path)
