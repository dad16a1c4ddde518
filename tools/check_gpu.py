"""Everything that only a GPU can show of the losses, step by step: tests, NCCL ranks, speed beside peers.

    python tools/check_gpu.py --out FOLDER [tests nccl compile sizes float32 large]
                              [--nccl libnccl.so.2] [--minutes 60]

A step's output goes to ``FOLDER/<step>.log``, and its end to the terminal. ``nccl`` needs a library that
lets ranks share one GPU (CONTRIBUTING), and is left out without one. ``compile`` runs what ``sizes`` and
``float32`` compile, on all cores, so that these find it in torch's caches (32,768 pairs and more do not fit
beside each other). allgrad must be installed, for its pytest plugin; peers that are not are left out of
the measurements. After ``--minutes`` the step that runs is stopped, and no other begins. On an H200 with
16 cores: tests 160 s, nccl 170, compile 65, sizes 295, float32 230, large 175.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = "-m pytest -q -p no:cacheprovider --no-header"
SIZES = "benchmarks/loss_sizes.py"
SMALL, LARGE = "256 512 1024 2048 4096 8192", "16384 32768 65536 131072"
WIDTHS = "256 512 768 1024"
KINDS = f"--dtype bfloat16 float16 --width {WIDTHS}"

# The commands of a step run one after the other; those of "compile" together.
STEPS: dict[str, list[str]] = {
    "tests": [
        f"{PYTEST} -n 8 tests/losses tests/modes/test_cuda.py tests/modes/test_device_cases.py"
    ],
    "nccl": [
        f"{PYTEST} -n 0 tests/modes/test_nccl_ranks.py tests/modes/test_device_cases.py",
        "benchmarks/losses_nccl.py",
    ],
    "compile": [
        f"{SIZES} --repeats 0 --without dense --loss {loss} --dtype {dtype} --width {width} --pairs {SMALL} 16384"
        for loss, (dtype, width) in product(
            ("clip", "siglip"),
            [*product(("bfloat16", "float16"), WIDTHS.split()), ("float32", "512")],
        )
    ],
    "sizes": [
        f"{SIZES} {KINDS} --repeats 9 --pairs {SMALL}",
        f"{SIZES} {KINDS} --repeats 5 --no-errors --pairs {LARGE} --without dense open_clip",
    ],
    "float32": [
        f"{SIZES} --dtype float32 --repeats 7 --without dense",
        f"{SIZES} --dtype float32 --tf32 --repeats 7 --without dense",
    ],
    "large": ["benchmarks/contrastive.py"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, required=True, help="the folder of the logs")
    parser.add_argument("--nccl", type=Path, help="a libnccl from 2.30 on")
    parser.add_argument("--minutes", type=float, default=60, help="for all steps together")
    given = parser.parse_args()
    if unknown := set(given.steps) - set(STEPS):
        parser.error(f"no step {', '.join(sorted(unknown))}")
    steps = given.steps or [step for step in STEPS if step != "nccl" or given.nccl]
    if "nccl" in steps and given.nccl is None:
        parser.error("the step nccl needs --nccl")

    given.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + 60 * given.minutes, False
    for step in steps:
        if time.monotonic() >= end:
            print(f"== {step}: not begun")
            failed = True
            continue
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        environment["PYTHONPATH"] = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
        if step == "compile":
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        if step == "nccl":
            library = str(given.nccl.resolve())
            environment |= {"LD_PRELOAD": library, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        failed |= not _run(step, given.out / f"{step}.log", environment, end)
    sys.exit(failed)


def _run(step: str, log: Path, environment: dict[str, str], end: float) -> bool:
    began, codes = time.monotonic(), []
    with log.open("w") as output:
        waves = [STEPS[step]] if step == "compile" else [[command] for command in STEPS[step]]
        for wave in waves:
            running = [
                subprocess.Popen(
                    [sys.executable, *command.split()],
                    cwd=ROOT,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command in wave
            ]
            codes += [_code(process, end) for process in running]
    lines = log.read_text(errors="replace").splitlines()
    print(f"== {step}: exit {codes}, {time.monotonic() - began:.0f} s")
    print("\n".join(lines[-(4 if step == "compile" else 200) :]), flush=True)
    return not any(codes)


def _code(process: subprocess.Popen[bytes], end: float) -> int:
    """The exit status; at the end of the time, that of a process which is stopped with all it started."""
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return process.wait()


if __name__ == "__main__":
    main()
