"""Time of the linear layers on packed weights of each type, beside torch's own product in float32.

    python -m benchmarks.kernels.bench_linear [--threads N] [--quick]

Seeded inputs, as many layers as exceed the last-level cache. Reports GB/s of weights and GFLOP/s; the baseline is
torch.nn.functional.linear on the plain weights. Prints a line for each case, then one JSON line: microseconds a layer,
median and spread of the runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels import ops
from serve.kernels.packed_weight import PACKED_TYPES

WORKING_SET_BYTES = 256 << 20
NUM_RUNS = 7
# Outputs and inputs of one layer: gate and up, then down of a 135M model; a 0.6B model's gate and up.
SHAPES = [(3072, 576), (576, 1536), (6144, 1024)]
ROWS = [1, 2, 4, 8, 32, 256]


def time_layers(run_layer: Callable[[int], Tensor], num_layers: int) -> list[float]:
    """Give microseconds a layer for each run, after one warm-up."""
    runs = []
    for _ in range(NUM_RUNS + 1):
        start = time.perf_counter()
        for layer in range(num_layers):
            run_layer(layer)
        runs.append((time.perf_counter() - start) / num_layers * 1e6)
    return runs[1:]


def run_shape(num_out: int, num_in: int, rows: list[int], num_layers: int) -> list[dict[str, object]]:
    """Time one shape for each number of rows and print a line each."""
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(num_out, num_in, generator=generator) for _ in range(num_layers)]
    results: list[dict[str, object]] = []
    for dtype, num_rows in itertools.product(PACKED_TYPES, rows):
        packed = [ops.pack_linear(weight.to(dtype)) for weight in plain]
        name = str(dtype).removeprefix("torch.")
        x = torch.randn(num_rows, num_in, generator=generator)
        own = time_layers(lambda layer, x=x, packed=packed: ops.linear(x, packed[layer]), num_layers)  # type: ignore[misc]
        torch_us = statistics.median(time_layers(lambda layer, x=x: F.linear(x, plain[layer]), num_layers))  # type: ignore[misc]
        median = statistics.median(own)
        size = num_out * num_in
        print(
            f"{num_out:5} x {num_in:<5} {name:8} rows={num_rows:<4} {median:9.1f} us "
            f"(min {min(own):.1f}, max {max(own):.1f})  "
            f"{dtype.itemsize * size / median / 1e3:5.1f} GB/s {2 * size * num_rows / median / 1e3:6.1f} GFLOP/s  "
            f"torch {torch_us:.1f} us",
            flush=True,
        )
        results.append(
            {
                "num_out": num_out,
                "num_in": num_in,
                "weights": name,
                "rows": num_rows,
                "us": round(median, 1),
                "torch": round(torch_us, 1),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="one small case, as a smoke test")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ops.set_num_threads(arguments.threads)
    print(ops.library_description(), f"load={os.getloadavg()[0]:.1f}")
    cases: list[dict[str, object]] = []
    for num_out, num_in in SHAPES[:1] if arguments.quick else SHAPES:
        num_layers = 1 if arguments.quick else max(1, WORKING_SET_BYTES // (4 * num_out * num_in))
        cases += run_shape(num_out, num_in, ROWS[:1] if arguments.quick else ROWS, num_layers)
    facts = {
        "benchmark": "linear",
        "kernels": ops.library_description(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "cases": cases,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
