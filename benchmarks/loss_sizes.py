"""Losses by batch size on one CUDA device: allgrad beside dense implementations and peers, in turns.

    python benchmarks/loss_sizes.py [--loss clip siglip] [--dtype bfloat16] [--width 512] [--tf32]
                                    [--pairs 256 512 ... 131072] [--repeats 30] [--json FILE]
                                    [--without compiled] [--no-errors]

A step is forward and backward; its time is that between two CUDA events, and includes the host if
the device waits for it. Implementations take turns in a new random order for each round, and one
that has taken a second in all is skipped in further rounds. Peers that are not installed are left
out; what does not fit into memory shows its error. ``--repeats 0`` measures nothing, and leaves compiled
kernels in the caches of torch for a run that does. Errors are those of the gradients of the features and
of the scale, against float64, at 2,048 pairs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from contrastive import dense, features, milliseconds, step
from torch.nn.functional import logsigmoid

from allgrad.losses import clip_loss, reference, siglip_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Implementations = dict[str, Callable[..., Tensor]]

ENOUGH_MS = 1000
WARM_UP = 6
PAIRS = [256 << i for i in range(10)]
BIAS = -10.0


def dense_sigmoid(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """All scores at once; as under autocast, the product in 16 bits, the rest in 32."""
    scores = (scale.to(image.dtype) * image @ text.T).float() + bias
    sign = 2 * torch.eye(len(image), device=image.device) - 1
    return -logsigmoid(sign * scores).sum() / len(image)


def clip_implementations() -> Implementations:
    found: Implementations = {
        "allgrad": clip_loss,
        "dense": dense,
        "compiled": torch.compile(dense, dynamic=False),
    }
    try:
        from open_clip.loss import ClipLoss
    except ImportError:
        print("open_clip is not installed: left out")
    else:
        peer = ClipLoss()
        found["open_clip"] = lambda i, t, s: peer(i, t, s.to(i.dtype))
    return found


def siglip_implementations() -> Implementations:
    found: Implementations = {
        "allgrad": siglip_loss,
        "dense": dense_sigmoid,
        "compiled": torch.compile(dense_sigmoid, dynamic=False),
    }
    try:
        from open_clip.loss import SigLipLoss
    except ImportError:
        print("open_clip is not installed: left out")
    else:
        peer = SigLipLoss()
        found["open_clip"] = lambda i, t, s, b: peer(i, t, s.to(i.dtype), b.to(i.dtype))
    try:
        from siglip_kernel import fused_siglip_loss
    except ImportError:
        print("siglip_kernel is not installed: left out")
    else:
        found["siglip-kernel"] = lambda i, t, s, b: fused_siglip_loss(i, t, s.log(), b)
    return found


LOSSES = {
    "clip": (clip_implementations, reference.clip),
    "siglip": (siglip_implementations, reference.siglip),
}


def inputs_of(loss: str, pairs: int, width: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    inputs = features(pairs, width, dtype, "cuda", seed)
    if loss == "siglip":
        inputs.append(torch.tensor(BIAS, device="cuda", requires_grad=True))
    return inputs


def tried(run: Callable[[], object]) -> str | None:
    """Run it until nothing is compiled or captured any more; what went wrong, if anything."""
    try:
        run()
        run()
        since = time.monotonic()
        for _ in range(WARM_UP):
            if time.monotonic() - since < 1:
                run()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  a peer may refuse a size in its own way
        gc.collect()
        torch.cuda.empty_cache()
        return type(error).__name__
    return None


def times(
    implementations: Implementations, inputs: list[Tensor], repeats: int
) -> dict[str, float | str]:
    runs = {name: partial(step, loss, inputs) for name, loss in implementations.items()}
    found: dict[str, float | str] = {}
    for name, run in list(runs.items()):
        wrong = tried(run)
        if wrong is not None:
            found[name] = wrong
            del runs[name]
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)  # noqa: S311
    for _ in range(repeats):
        for name in order.sample(list(runs), len(runs)):
            if sum(taken[name]) < ENOUGH_MS:
                taken[name].append(milliseconds(runs[name]))
    return {**found, **{name: statistics.median(each) for name, each in taken.items() if each}}


def errors(
    implementations: Implementations,
    formula: Callable[..., Tensor],
    inputs: list[Tensor],
) -> dict[str, list[float] | str]:
    """Errors relative to float64: of the value, then of each gradient."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    step(formula, exact)
    with torch.no_grad():
        want = float(formula(*exact))
    found: dict[str, list[float] | str] = {}
    for name, loss in implementations.items():
        wrong = tried(partial(step, loss, inputs))
        if wrong is not None:
            found[name] = wrong
            continue
        with torch.no_grad():
            value = abs(float(loss(*inputs)) - want) / want
        found[name] = [
            value,
            *(
                float((x.grad.double() - y.grad).norm() / y.grad.norm())
                for x, y in zip(inputs, exact, strict=True)
            ),
        ]
    return found


def shown(value: float | str | None) -> str:
    return f"{value:9.3f}" if isinstance(value, float) else f"{(value or '-')[:9]:>9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--width", type=int, nargs="+", default=[512])
    parser.add_argument("--pairs", type=int, nargs="+", default=PAIRS)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--without", nargs="+", default=[], help="implementations to leave out")
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    results = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, times in ms")
    for loss in args.loss:
        for dtype in args.dtype:
            for width in args.width:
                make, formula = LOSSES[loss]
                implementations, kind = make(), getattr(torch, dtype)
                for name in args.without:
                    implementations.pop(name, None)
                print(f"{loss}, {dtype}, D {width}\n  {'B':>9}", end="")
                print("".join(f"{name[:13]:>14}" for name in implementations))
                for pairs in args.pairs:
                    torch.compiler.reset()
                    inputs = inputs_of(loss, pairs, width, kind)
                    found = times(implementations, inputs, args.repeats)
                    print(f"  {pairs:>9,}", end="")
                    print(
                        "".join(f"{shown(found.get(n)):>14}" for n in implementations), flush=True
                    )
                    results.append({"loss": loss, "dtype": dtype, "D": width, "B": pairs, **found})
                if not args.repeats or args.no_errors:
                    continue
                off = errors(implementations, formula, inputs_of(loss, 2048, width, kind, 1))
                for name, each in off.items():
                    text = each if isinstance(each, str) else " ".join(f"{e:.1e}" for e in each)
                    print(f"  from float64: {name:<14} {text}", flush=True)
                results.append({"loss": loss, "dtype": dtype, "D": width, "errors": off})
    if args.json:
        args.json.write_text(json.dumps({"tf32": args.tf32, "results": results}, indent=1))


if __name__ == "__main__":
    main()
