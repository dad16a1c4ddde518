"""CLIP's loss, forward and backward: allgrad, dense and chunked implementations, and the floor, in one run.

    python benchmarks/contrastive.py                       # CUDA if there is a device, else CPU
    python benchmarks/contrastive.py --device cpu [--ranks 4] [--pairs 8192] [--width 256]
    python benchmarks/contrastive.py --device cuda [--pairs 65536 131072] [--width 512 1024]
    python benchmarks/contrastive.py --tile-configs        # CUDA: the kernels alone, for each tile config

CUDA: one device, bfloat16. The floor is four matrix products (scores, scores again, two gradients)
at the rate of a product of 8192 x 8192 matrices, measured in the same run. Extra memory is the peak
above what was allocated before, which is the features; gradients count as extra. CPU: float32, one
thread on each rank. A sample is the time of the slowest rank after a barrier; extra memory is the
largest growth of a rank's resident set. Implementations take turns, on CUDA in a new random order
for each round; one that has taken three seconds in all is skipped in further rounds. Peers that are
not installed are left out.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

import allgrad as ag
from allgrad.losses import clip_loss, info_nce_loss, reference, siglip_loss
from allgrad.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SCALE = 20.0
LOG2E = 1.4426950408889634
MIB = 2**20
ENOUGH_MS = 3000

# BLOCK_M, BLOCK_N, BLOCK_K, warps and stages: those that Triton compiles for Hopper without spilling
# registers.
TILE_CONFIGS = (
    *((128, 128, 64, 4, 2), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 3)),
    *((128, 128, 128, 4, 2), (128, 128, 128, 8, 2), (64, 256, 64, 4, 3), (128, 64, 64, 4, 4)),
    *((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4)),
)


def features(pairs: int, width: int, dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    """Images, and texts that are similar to their image."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (pairs, width)
    image = normalize(torch.randn(shape, device=device, generator=generator), dim=1)
    other = normalize(torch.randn(shape, device=device, generator=generator), dim=1)
    text = normalize(image + other, dim=1)
    scale = torch.tensor(SCALE, device=device)
    return [x.detach().requires_grad_() for x in (image.to(dtype), text.to(dtype), scale)]


def step(loss: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    for x in inputs:
        x.grad = None
    loss(*inputs).backward()


# ---- one CUDA device


def chunks(image: Tensor, text: Tensor, scale: Tensor, rows: int = 4096) -> Tensor:
    """Some rows at a time, recomputed in backward."""

    def some(queries: Tensor, keys: Tensor, start: int) -> Tensor:
        own = torch.arange(start, start + len(queries), device=queries.device)
        scores = scale.to(queries.dtype) * queries @ keys.T
        return cross_entropy(scores.float(), own, reduction="sum")

    total = image.new_zeros((), dtype=torch.float32)
    for a, b in ((image, text), (text, image)):
        for start in range(0, len(a), rows):
            part = a[start : start + rows]
            total = total + checkpoint(some, part, b, start, use_reentrant=False)
    return total / (2 * len(image))


def dense(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """All scores at once; as under autocast, matrix products in 16 bits, cross entropy in 32."""
    scores = scale.to(image.dtype) * image @ text.T
    own = torch.arange(len(image), device=image.device)
    return (cross_entropy(scores.float(), own) + cross_entropy(scores.T.float(), own)) / 2


def dense_in_16_bits(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """All scores at once, everything in 16 bits; its gradients are much less exact."""
    return reference.clip(image, text, scale.to(image.dtype))


def cuda_implementations() -> dict[str, Callable[..., Tensor]]:
    implementations: dict[str, Callable[..., Tensor]] = {
        "allgrad": clip_loss,
        "dense": dense,
        "dense, compiled": torch.compile(dense, dynamic=False),
        "dense in 16 bits": dense_in_16_bits,
        "same, compiled": torch.compile(dense_in_16_bits, dynamic=False),
        "row chunks": chunks,
    }
    try:
        from open_clip.loss import ClipLoss
    except ImportError:
        print("open_clip is not installed: left out")
    else:
        implementations["open_clip"] = lambda i, t, s: ClipLoss()(i, t, s.to(i.dtype))
    try:
        from inf_cl import cal_flash_loss
    except ImportError:
        print("inf_cl is not installed: left out")
    else:

        def inf_cl(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
            own = torch.arange(len(image), device=image.device)
            one = cal_flash_loss(image, text, own, scale).mean()
            return (one + cal_flash_loss(text, image, own, scale).mean()) / 2

        implementations["inf_cl"] = inf_cl
    return implementations


def milliseconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def flops_per_ms() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    times = [milliseconds(lambda: a @ b) for _ in range(40)]
    return 2 * 8192**3 / statistics.median(times[10:])


def extra_memory(loss: Callable[..., Tensor], inputs: list[Tensor]) -> float | None:
    """Extra bytes of a step, after a warm-up step; None if out of memory."""
    try:
        step(loss, inputs)
        for x in inputs:
            x.grad = None
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(loss, inputs)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    except torch.cuda.OutOfMemoryError:
        for x in inputs:
            x.grad = None
        gc.collect()
        torch.cuda.empty_cache()
        return None


def on_cuda(pairs: list[int], widths: list[int], repeats: int, largest: int) -> None:
    rate = flops_per_ms()
    print(f"{torch.cuda.get_device_name()}, bfloat16, matrix product {rate / 1e9:.0f} TFLOP/s")
    implementations = cuda_implementations()
    for width in widths:
        for count in pairs:
            compare(implementations, count, width, repeats, rate)
    for name, loss in (("siglip_loss", siglip_loss), ("info_nce_loss", info_nce_loss)):
        inputs = features(pairs[0], widths[0], torch.bfloat16, "cuda", 0)
        extra = extra_memory(loss, inputs)
        took = statistics.median(milliseconds(partial(step, loss, inputs)) for _ in range(repeats))
        report(
            name,
            took,
            extra or 0,
            floor=8 * pairs[0] ** 2 * widths[0] / rate,
            count=pairs[0],
            width=widths[0],
        )
    accuracy(implementations, widths[0])
    inputs = features(largest, widths[0], torch.bfloat16, "cuda", 0)
    extra = extra_memory(clip_loss, inputs)
    took = milliseconds(partial(step, clip_loss, inputs))
    floor = 8 * largest**2 * widths[0] / rate
    report("allgrad", took, extra or 0, floor=floor, count=largest, width=widths[0])


def compare(
    implementations: dict[str, Callable[..., Tensor]],
    count: int,
    width: int,
    repeats: int,
    rate: float,
) -> None:
    floor = 8 * count**2 * width / rate
    inputs = features(count, width, torch.bfloat16, "cuda", 0)
    extra = {name: extra_memory(loss, inputs) for name, loss in implementations.items()}
    fitting = [name for name in implementations if extra[name] is not None]
    times: dict[str, list[float]] = {name: [] for name in fitting}
    order = random.Random(0)  # noqa: S311
    for _ in range(repeats):
        for name in order.sample(
            fitting, len(fitting)
        ):  # the card's clock depends on what ran before
            if sum(times[name]) < ENOUGH_MS:
                times[name].append(milliseconds(partial(step, implementations[name], inputs)))
    for name in implementations:
        if name not in fitting:
            print(f"  B {count:>9,}  D {width:>5,}  {name:<16} out of memory")
            continue
        took = statistics.median(times[name])
        report(name, took, extra[name] or 0, floor=floor, count=count, width=width)
        if len(times[name]) < repeats:
            print(f"{'':<32}median of {len(times[name])} instead of {repeats}")


def report(name: str, took: float, extra: float, *, floor: float, count: int, width: int) -> None:
    print(
        f"  B {count:>9,}  D {width:>5,}  {name:<16} {took:9.1f} ms   {took / floor:5.2f} x floor"
        f"   {extra / MIB:9.0f} MiB extra",
        flush=True,
    )


def accuracy(
    implementations: dict[str, Callable[..., Tensor]], width: int, count: int = 8192
) -> None:
    """The value and the gradients against float64 on the CPU."""
    inputs = features(count, width, torch.bfloat16, "cuda", 1)
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    step(reference.clip, exact)
    with torch.no_grad():
        want = float(reference.clip(*exact))
    for name, loss in implementations.items():
        step(loss, inputs)
        off = abs(float(loss(*inputs)) - want) / want
        errors = [
            float((x.grad.cpu().double() - y.grad).norm() / y.grad.norm())
            for x, y in zip(inputs, exact, strict=True)
        ]
        image, text, scale = errors
        print(
            f"  B {count:>9,}  D {width:>5,}  {name:<16} from float64: value {off:.1e}, "
            f"gradients of image {image:.1e}, text {text:.1e}, scale {scale:.1e}"
        )


def kernels(pairs: int, widths: list[int]) -> None:
    """Time a panel of each kernel with each config, relative to its matrix product."""
    from allgrad.losses._kind import LossKind
    from allgrad.losses._tiles.kernels import sums_tile
    from allgrad.losses._tiles.torch import Weights
    from allgrad.losses._tiles.triton import TileConfig, TritonTiles

    rate = flops_per_ms()
    print(f"{torch.cuda.get_device_name()}, bfloat16, matrix product {rate / 1e9:.0f} TFLOP/s")
    for width in widths:
        image, text, scale = (x.detach() for x in features(pairs, width, torch.bfloat16, "cuda", 0))
        tiles = TritonTiles(image, text, scale, first_pair=0)
        lse = [x for x in tiles.lse(LossKind.SOFTMAX_BOTH) if x is not None]
        weights = Weights(LossKind.SOFTMAX_BOTH, *lse, 0.0, torch.zeros_like(lse[0]))
        logs = [x * LOG2E for x in lse]
        rows = slice(0, min(tiles.panel, pairs))
        memory = image.new_empty(rows.stop, rows.stop)
        for config in TILE_CONFIGS:
            tiles.sums_config = tiles.softmax_config = tiles.sigmoid_config = TileConfig(*config)
            runs = {
                "sums": (partial(tiles._launch_sums, sums_tile, rows, True), pairs),
                "weights": (
                    partial(tiles._launch_softmax, weights, logs, rows, rows, memory),
                    rows.stop,
                ),
                "sigmoid": (
                    partial(tiles._launch_sigmoid, rows, rows, weights.pair_weights, memory),
                    rows.stop,
                ),
            }
            for name, (run, columns) in runs.items():
                floor = 2 * rows.stop * columns * width / rate
                print(
                    f"  D {width:>5,}  {name:<8} {config!s:<24} {times_floor(run, floor)}",
                    flush=True,
                )


def times_floor(run: Callable[[], object], floor: float) -> str:
    try:
        times = [milliseconds(run) for _ in range(23)]
    except Exception as error:  # noqa: BLE001  Triton has several for a config that does not fit
        return type(error).__name__
    return f"{statistics.median(times[3:]) / floor:5.2f} x its product"


# ---- ranks on the CPU


def gather_dense(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Every rank gathers both sides and computes all scores."""
    return reference.clip(
        ag.all_gather(image, sizes="equal"), ag.all_gather(text, sizes="equal"), scale
    )


def gather_dense_own_rows(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Every rank gathers both sides and computes the scores of its images and of its texts."""
    images, texts = (ag.all_gather(x, sizes="equal") for x in (image, text))
    own = torch.arange(len(image)) + dist.get_rank() * len(image)
    by_image = cross_entropy(scale * image @ texts.T, own)
    by_text = cross_entropy(scale * text @ images.T, own)
    return (by_image + by_text) / 2


CPU_IMPLEMENTATIONS = {
    "allgrad": partial(clip_loss, sizes="equal"),
    "allgrad, ring": partial(clip_loss, sizes="equal", ring=True),
    "gather + dense": gather_dense,
    "gather + dense, own rows": gather_dense_own_rows,
}


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def growth(loss: Callable[..., Tensor], inputs: list[Tensor]) -> int:
    """How far the resident set grows in a step."""
    for x in inputs:
        x.grad = None
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    before = resident("VmRSS")
    step(loss, inputs)
    return resident("VmHWM") - before


def measure(pairs: int, width: int, repeats: int) -> dict[str, tuple[list[float], float]]:
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = features(pairs // world, width, torch.float32, "cpu", rank)
    names = list(CPU_IMPLEMENTATIONS)
    times: dict[str, list[float]] = {name: [] for name in names}
    memory = {}
    for turn in range(repeats + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            step(CPU_IMPLEMENTATIONS[name], inputs)
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn:  # the first round warms up
                times[name].append(took.item())
    for name in names:
        dist.barrier()
        grown = torch.tensor(float(growth(CPU_IMPLEMENTATIONS[name], inputs)))
        dist.all_reduce(grown, dist.ReduceOp.MAX)
        memory[name] = grown.item()
    return {name: (times[name], memory[name]) for name in names}


def on_cpu(ranks: int, pairs: int, width: int, repeats: int) -> None:
    print(f"{ranks} ranks, gloo, one thread each, {pairs:,} pairs, width {width}, float32")
    found = run_ranks(measure, ranks, pairs, width, repeats, timeout=1800)[0]
    own, own_memory = statistics.median(found["allgrad"][0]), found["allgrad"][1]
    for name, (times, memory) in found.items():
        took = statistics.median(times)
        print(
            f"  {name:<26} {1e3 * took:8.2f} ms ({1e3 * min(times):.2f} - {1e3 * max(times):.2f})"
            f"   {took / own:5.2f} x allgrad   {memory / MIB:7.0f} MiB extra"
            f"   {memory / own_memory:5.1f} x allgrad"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, nargs="+")
    parser.add_argument("--width", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--largest", type=int, default=1_048_576)
    parser.add_argument("--tile-configs", action="store_true")
    args = parser.parse_args()
    if args.tile_configs:
        kernels((args.pairs or [65_536])[0], args.width or [512, 1024])
    elif args.device == "cpu":
        pairs, width = (args.pairs or [8192])[0], (args.width or [256])[0]
        on_cpu(args.ranks, pairs, width, args.repeats)
    else:
        pairs, widths = args.pairs or [65_536, 131_072], args.width or [512, 1024]
        on_cuda(pairs, widths, args.repeats, args.largest)


if __name__ == "__main__":
    main()
