"""Time of one layer's paged attention on the CPU, beside a plain read of the same bytes.

    python -m benchmarks.kernels.bench_paged_attention [--threads N] [--quick]

Seeded inputs, blocks in random order, as many layers as exceed the last-level cache. Decode cases report GB/s of keys
and values and percent of what a plain sum over as much memory reaches; prefill cases report GFLOP/s. The baseline is
the plain-torch twin. Prints a line for each case, then one JSON line: microseconds a layer, median and spread of the
runs.
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

import torch
from torch import Tensor

from serve.kernels import ops, reference
from serve.kernels.attention import AttentionMetadata, KVCache, select_backend

BLOCK_SIZE = 16
NUM_BLOCKS = 2080
WORKING_SET_BYTES = 256 << 20
NUM_RUNS = 7
Attend = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """A batch of equal requests: query_len new tokens each, seq_len tokens in all."""

    name: str
    num_reqs: int
    query_len: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str = "bfloat16"


CASES = [
    Case("decode", 1, 1, 128, 9, 3, 64),
    Case("decode", 1, 1, 1024, 9, 3, 64),
    Case("decode", 1, 1, 4096, 9, 3, 64),
    Case("decode", 8, 1, 1024, 9, 3, 64),
    Case("decode", 32, 1, 1024, 9, 3, 64),
    Case("decode", 8, 1, 1024, 16, 8, 128),
    Case("decode", 1, 1, 1024, 9, 3, 64, "float16"),
    Case("decode", 1, 1, 1024, 9, 3, 64, "float32"),
    Case("prefill", 1, 512, 512, 9, 3, 64),
    Case("prefill", 1, 256, 2048, 16, 8, 128),
]
QUICK = CASES[:1]


def make_metadata(case: Case, generator: torch.Generator) -> AttentionMetadata:
    """Give every request its own blocks, in random order."""
    blocks = -(-case.seq_len // BLOCK_SIZE)
    order = torch.randperm(NUM_BLOCKS, generator=generator)[: case.num_reqs * blocks]
    num_tokens = case.num_reqs * case.query_len
    return AttentionMetadata(
        query_start_loc=torch.arange(0, num_tokens + 1, case.query_len, dtype=torch.int32),
        seq_lens=torch.full((case.num_reqs,), case.seq_len, dtype=torch.int32),
        block_table=order.view(case.num_reqs, blocks).int(),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        num_reqs=case.num_reqs,
        num_tokens=num_tokens,
        max_query_len=case.query_len,
        max_seq_len=case.seq_len,
    )


def make_layers(case: Case, *, is_quick: bool) -> list[KVCache]:
    """Allocate caches until what one pass reads exceeds the last-level cache."""
    layers = 1 if is_quick else min(48, max(1, WORKING_SET_BYTES // kv_bytes(case)))
    backend = select_backend(torch.device("cpu"))
    caches = [
        backend.allocate_kv_cache(
            NUM_BLOCKS,
            BLOCK_SIZE,
            num_kv_heads=case.num_kv_heads,
            head_size=case.head_size,
            dtype=getattr(torch, case.dtype),
        )
        for _ in range(layers)
    ]
    for cache in caches:
        cache.key.fill_(0.5)
        cache.value.fill_(0.25)
    return caches


def kv_bytes(case: Case) -> int:
    """Give the bytes of keys and values that one layer reads."""
    item = getattr(torch, case.dtype).itemsize
    return int(2 * case.num_reqs * case.seq_len * case.num_kv_heads * case.head_size * item)


def time_layers(attend: Attend, case: Case, caches: list[KVCache], meta: AttentionMetadata) -> list[float]:
    """Give microseconds a layer for each run, after one warm-up."""
    query = torch.randn(meta.num_tokens, case.num_heads, case.head_size, generator=torch.Generator().manual_seed(1))
    out = torch.empty_like(query)
    runs = []
    for _ in range(NUM_RUNS + 1):
        start = time.perf_counter()
        for cache in caches:
            attend(query, cache, meta, out, scale=case.head_size**-0.5)
        runs.append((time.perf_counter() - start) / len(caches) * 1e6)
    return runs[1:]


def read_speed() -> float:
    """Give GB/s of a plain sum over memory that exceeds the last-level cache."""
    memory: Tensor = torch.ones(WORKING_SET_BYTES // 4)
    best = min(_timed(memory.sum) for _ in range(NUM_RUNS))
    return WORKING_SET_BYTES / best / 1e9


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def run_case(case: Case, memory_speed: float, *, is_quick: bool) -> dict[str, object]:
    """Time one case and its twin and print a line."""
    meta = make_metadata(case, torch.Generator().manual_seed(0))
    caches = make_layers(case, is_quick=is_quick)
    runs = time_layers(ops.paged_attention, case, caches, meta)
    twin = statistics.median(time_layers(reference.paged_attention, case, caches[:1], meta))
    median = statistics.median(runs)
    speed = kv_bytes(case) / median / 1e3
    keys = sum(case.seq_len - case.query_len + 1 + i for i in range(case.query_len))
    gflops = 4 * case.num_reqs * case.num_heads * case.head_size * keys / median / 1e3
    figure = f"{speed:5.1f} GB/s ({100 * speed / memory_speed:.0f} % of a plain read)"
    if case.name == "prefill":
        figure = f"{gflops:5.1f} GFLOP/s"
    shape = f"{case.num_heads}/{case.num_kv_heads}x{case.head_size} {case.dtype}"
    print(
        f"{case.name:7} reqs={case.num_reqs:<3} q={case.query_len:<4} kv={case.seq_len:<5} {shape:20} "
        f"{median:9.1f} us (min {min(runs):.1f}, max {max(runs):.1f})  {figure}  twin {twin:.0f} us",
        flush=True,
    )
    return asdict(case) | {"us": round(median, 1), "min": round(min(runs), 1), "max": round(max(runs), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="one small case, as a smoke test")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ops.set_num_threads(arguments.threads)
    print(ops.library_description(), f"load={os.getloadavg()[0]:.1f}")
    memory_speed = read_speed()
    cases = QUICK if arguments.quick else CASES
    results = [run_case(case, memory_speed, is_quick=arguments.quick) for case in cases]
    facts = {
        "benchmark": "paged_attention",
        "kernels": ops.library_description(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "read_gb_s": round(memory_speed, 1),
        "cases": results,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
