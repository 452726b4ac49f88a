"""Time of one layer's attention in both directions on the CPU, beside the plain-torch twin.

    python -m benchmarks.kernels.bench_encoder_attention [--threads N] [--quick]

Seeded inputs in the shapes of small embedding models: one request, equal requests, and requests of mixed lengths.
Reports GFLOP/s. Prints a line for each case, then one JSON line: microseconds a layer, median and spread of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate

import torch
from torch import Tensor

from serve.kernels import ops, reference
from serve.kernels.attention import AttentionMetadata

NUM_RUNS = 7
NUM_LAYERS = 12
Attend = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """A batch of requests of these lengths; the shape of the heads is a layer's."""

    name: str
    lengths: tuple[int, ...]
    num_heads: int
    head_size: int
    dtype: str = "float32"


CASES = [
    Case("one", (16,), 12, 32),
    Case("one", (256,), 12, 32),
    Case("one", (512,), 12, 64),
    Case("one", (512,), 12, 64, "bfloat16"),
    Case("equal", (32,) * 32, 12, 32),
    Case("equal", (256,) * 8, 12, 32),
    Case("mixed", (8, 16, 24, 32, 64, 128, 256, 512), 12, 64),
]
QUICK = CASES[:1]


def make_metadata(case: Case) -> AttentionMetadata:
    """Describe the batch; without a cache, only where the requests begin counts."""
    num_reqs, num_tokens = len(case.lengths), sum(case.lengths)
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32),
        seq_lens=torch.tensor(case.lengths, dtype=torch.int32),
        block_table=torch.zeros(num_reqs, 1, dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        max_query_len=max(case.lengths),
        max_seq_len=max(case.lengths),
    )


def make_heads(case: Case) -> list[Tensor]:
    """Give query, key, value and out."""
    generator = torch.Generator().manual_seed(0)
    shape = (sum(case.lengths), case.num_heads, case.head_size)
    heads = [torch.randn(shape, generator=generator).to(getattr(torch, case.dtype)) for _ in range(3)]
    return [*heads, torch.empty_like(heads[0])]


def time_layers(attend: Attend, case: Case) -> list[float]:
    """Give microseconds a layer for each run, after one warm-up."""
    meta = make_metadata(case)
    query, key, value, out = make_heads(case)
    runs = []
    for _ in range(NUM_RUNS + 1):
        start = time.perf_counter()
        for _ in range(NUM_LAYERS):
            attend(query, key, value, meta, out, scale=case.head_size**-0.5)
        runs.append((time.perf_counter() - start) / NUM_LAYERS * 1e6)
    return runs[1:]


def run_case(case: Case) -> dict[str, object]:
    """Time one case and its twin and print a line."""
    runs = time_layers(ops.encoder_attention, case)
    twin = statistics.median(time_layers(reference.encoder_attention, case))
    median = statistics.median(runs)
    pairs = sum(length * length for length in case.lengths)
    gflops = 4 * case.num_heads * case.head_size * pairs / median / 1e3
    shape = f"{case.num_heads}x{case.head_size} {case.dtype}"
    print(
        f"{case.name:5} reqs={len(case.lengths):<3} tokens={sum(case.lengths):<5} {shape:16} {median:9.1f} us "
        f"(min {min(runs):.1f}, max {max(runs):.1f})  {gflops:6.1f} GFLOP/s  twin {twin:.0f} us",
        flush=True,
    )
    return asdict(case) | {
        "us": round(median, 1),
        "min": round(min(runs), 1),
        "max": round(max(runs), 1),
        "twin": round(twin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="one small case, as a smoke test")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ops.set_num_threads(arguments.threads)
    print(ops.library_description(), f"load={os.getloadavg()[0]:.1f}")
    facts = {
        "benchmark": "encoder_attention",
        "kernels": ops.library_description(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "cases": [run_case(case) for case in (QUICK if arguments.quick else CASES)],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
