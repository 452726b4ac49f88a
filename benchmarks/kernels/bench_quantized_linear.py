"""Time of the linear layers on the blocks of GGUF files, beside the same layers on packed float32 weights.

    python -m benchmarks.kernels.bench_quantized_linear [--threads N] [--types Q4_1,Q8_0] [--quick]

Seeded blocks, as many layers as exceed the last-level cache as float32. Reports GB/s of weights and GFLOP/s; the
baseline is ops.linear on the same values. With one thread the times are processor time, so that a busy machine shows
less. Prints a line for each case, then one JSON line: microseconds a layer, the best of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor

from serve.kernels import ops
from serve.kernels.block_formats import TILE_FORMATS
from serve.kernels.quantized_weight import QuantizedBlocks

WORKING_SET_BYTES = 192 << 20
NUM_RUNS = 7
# Outputs and inputs of one layer: gate and up of a 135M and of a 0.6B model.
SHAPES = [(3072, 512), (6144, 1024)]
ROWS = [1, 2, 4, 8, 32, 256]


def best_time(run_layer: Callable[[int], Tensor], num_layers: int, clock: Callable[[], float]) -> float:
    """Give the least microseconds a layer of some runs."""
    runs = []
    for _ in range(NUM_RUNS):
        start = clock()
        for layer in range(num_layers):
            run_layer(layer)
        runs.append((clock() - start) / num_layers * 1e6)
    return min(runs)


def random_blocks(type_name: str, num_out: int, num_in: int, generator: torch.Generator) -> QuantizedBlocks:
    """Make blocks of random bytes, none of which can hold an infinite factor."""
    layout = TILE_FORMATS[type_name]
    num_bytes = num_in // layout.unit_inputs * layout.raw_bytes
    rows = torch.randint(0, 64, (num_out, num_bytes), generator=generator, dtype=torch.uint8)
    return QuantizedBlocks(rows, type_name, num_in)


def run_case(
    type_name: str, shape: tuple[int, int], rows: list[int], num_layers: int, clock: Callable[[], float]
) -> list[dict[str, object]]:
    """Time one type and shape for each number of rows and print a line each."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in = shape
    weights = [ops.pack_quantized(random_blocks(type_name, num_out, num_in, generator)) for _ in range(num_layers)]
    packed = [ops.pack_linear(weight.plain()) for weight in weights]
    size = num_out * num_in
    results: list[dict[str, object]] = []
    for num_rows in rows:
        x = torch.randn(num_rows, num_in, generator=generator)
        own = best_time(lambda i, x=x: ops.linear_quantized(x, [weights[i]]), num_layers, clock)  # type: ignore[misc]
        float32 = best_time(lambda i, x=x: ops.linear(x, packed[i]), num_layers, clock)  # type: ignore[misc]
        print(
            f"{type_name} {num_out:5} x {num_in:<5} rows={num_rows:<4} {own:9.1f} us  "
            f"{weights[0].data.numel() / own / 1e3:5.1f} GB/s {2 * size * num_rows / own / 1e3:6.1f} GFLOP/s  "
            f"float32 {float32:9.1f} us, {float32 / own:.2f} times as long",
            flush=True,
        )
        results.append(
            {"type": type_name, "num_out": num_out, "num_in": num_in, "rows": num_rows}
            | {"us": round(own, 1), "float32": round(float32, 1)}
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--types", default="Q4_1,Q8_0,Q4_K,Q6_K")
    parser.add_argument("--quick", action="store_true", help="one small case, as a smoke test")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ops.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    print(ops.library_description(), f"load={os.getloadavg()[0]:.1f}")
    cases: list[dict[str, object]] = []
    for type_name in arguments.types.split(",")[: 1 if arguments.quick else None]:
        for shape in SHAPES[:1] if arguments.quick else SHAPES:
            num_layers = 1 if arguments.quick else max(1, WORKING_SET_BYTES // (4 * shape[0] * shape[1]))
            cases += run_case(type_name, shape, ROWS[:1] if arguments.quick else ROWS, num_layers, clock)
    facts = {
        "benchmark": "quantized_linear",
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
