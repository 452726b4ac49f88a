"""Time of a model's step without the server: one call for all layers against the same model op by op.

    python -m benchmarks.model_step [MODEL] [--threads 1,2] [--cases decode,prefill] [--quick]

MODEL is a file, a folder or a name that serve knows; the built-in model if left out. Decodes 1, 8 and 32 requests at
contexts of 128 and 1024, and computes prompts of 128 and 1024 tokens; logits of the rows that sample are included. The
two take turns step by step, on caches of their own. With one thread the times are processor time, so that a busy
machine shows less. python_us is the time of a forward call outside the library. Prints a line for each case, then one
JSON line: milliseconds a step, the best and the median of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.checkpoint import load_checkpoint
from serve.config import ModelConfig, read_environment
from serve.kernels import ops
from serve.kernels.attention import AttentionMetadata, KVCache, select_backend
from serve.model_store import resolve_model
from serve.models.llama import LlamaModel
from serve.models.registry import load_model

CPU = torch.device("cpu")
BUILT_IN = ModelConfig().model
BLOCK_SIZE = 16
CONTEXTS = (128, 1024)
BATCHES = (1, 8, 32)
PROMPTS = (128, 1024)
SECONDS = 2.0
MIN_RUNS = 3


@dataclass
class Case:
    """One step: num_reqs requests, each with num_new tokens that end at length."""

    name: str
    num_reqs: int
    num_new: int
    length: int


@dataclass
class Step:
    """The inputs of a case."""

    input_ids: Tensor
    positions: Tensor
    meta: AttentionMetadata
    rows: Tensor | None


def make_step(case: Case, vocab_size: int) -> Step:
    """Give every request blocks of its own, in random order."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = -(-case.length // BLOCK_SIZE)
    table = torch.randperm(case.num_reqs * num_blocks, generator=generator).view(case.num_reqs, num_blocks).int()
    positions = torch.arange(case.length - case.num_new, case.length)
    slots = table.long()[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    num_tokens = case.num_reqs * case.num_new
    starts = torch.arange(case.num_reqs + 1, dtype=torch.int32) * case.num_new
    meta = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.full((case.num_reqs,), case.length, dtype=torch.int32),
        block_table=table,
        slot_mapping=slots.flatten(),
        num_reqs=case.num_reqs,
        num_tokens=num_tokens,
        max_query_len=case.num_new,
        max_seq_len=case.length,
    )
    ids = torch.randint(0, vocab_size, (num_tokens,), generator=generator, dtype=torch.int32)
    rows = None if case.num_new == 1 else starts[1:].long() - 1
    return Step(ids, positions.repeat(case.num_reqs), meta, rows)


def make_caches(model: LlamaModel, num_blocks: int) -> list[KVCache]:
    """Allocate caches filled with small numbers."""
    backend = select_backend(CPU)
    caches = [
        backend.allocate_kv_cache(
            num_blocks, BLOCK_SIZE, num_kv_heads=model.num_kv_heads, head_size=model.head_size, dtype=torch.float32
        )
        for _ in range(model.num_layers)
    ]
    for cache in caches:
        cache.key.fill_(0.1)
        cache.value.fill_(0.1)
    return caches


def run(model: LlamaModel, step: Step, caches: list[KVCache]) -> Tensor:
    """Compute the logits of a step."""
    hidden_states = model.forward(step.input_ids, step.positions, caches, step.meta, rows=step.rows)
    return model.compute_logits(hidden_states)


def time_case(
    models: dict[str, LlamaModel], case: Case, vocab_size: int, *, clock: Callable[[], float], seconds: float
) -> dict[str, object]:
    """Time a step of each model, in turns; give best and median milliseconds by model."""
    step = make_step(case, vocab_size)
    num_blocks = int(step.meta.block_table.max()) + 1
    caches = {name: make_caches(model, num_blocks) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    outputs = {name: run(model, step, caches[name]) for name, model in models.items()}
    assert all(torch.equal(output, outputs["one_call"]) for output in outputs.values()), f"{case.name}: bits differ"
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["one_call"]) < MIN_RUNS:
        for name, model in models.items():
            start = clock()
            run(model, step, caches[name])
            times[name].append((clock() - start) * 1e3)
    row: dict[str, object] = {"case": case.name, "requests": case.num_reqs, "tokens": case.num_new * case.num_reqs}
    row["length"] = case.length
    for name, values in times.items():
        row[name] = {"best": round(min(values), 3), "median": round(statistics.median(values), 3)}
    return row


def time_python(model: LlamaModel, vocab_size: int) -> float:
    """Give the microseconds of Python around the library's call: a step of no tokens has nothing to compute."""
    step = make_step(Case("none", 1, 1, 16), vocab_size)
    step.meta.num_tokens = 0
    step.meta.num_reqs = 0
    caches = make_caches(model, 1)
    best = float("inf")
    for _ in range(300):
        start = time.perf_counter()
        model.forward(step.input_ids, step.positions, caches, step.meta)
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default=BUILT_IN)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--cases", default="decode,prefill")
    parser.add_argument("--quick", action="store_true", help="batch 1 and the shorter lengths only")
    parser.add_argument("--only-one-call", action="store_true", help="leave the model op by op out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = resolve_model(args.model, None, read_environment())
    checkpoint = load_checkpoint(path)
    config = ModelConfig(model=str(path), max_model_len=max(CONTEXTS) + 1)
    model = load_model(checkpoint, config, dtype=torch.float32, device=CPU)
    assert isinstance(model, LlamaModel), "only decoders have steps of one call"
    models = {"one_call": model} if args.only_one_call else {"one_call": model, "op_by_op": model.op_by_op()}
    vocab_size = checkpoint.arch.vocab_size
    cases = [Case("decode", n, 1, length) for length in CONTEXTS for n in BATCHES]
    cases += [Case("prefill", 1, length, length) for length in PROMPTS]
    kinds = args.cases.split(",")
    chosen = [c for c in cases if c.name in kinds and (not args.quick or (c.num_reqs == 1 and c.length == 128))]
    results = []
    for num_threads in [int(number) for number in args.threads.split(",")]:
        ops.set_num_threads(num_threads)
        clock = time.thread_time if num_threads == 1 else time.perf_counter
        for case in chosen:
            row = time_case(models, case, vocab_size, clock=clock, seconds=SECONDS)
            row["threads"] = num_threads
            results.append(row)
            print(
                " ".join(f"{key}={value}" for key, value in row.items()), f"load={os.getloadavg()[0]:.1f}", flush=True
            )
    summary = {
        "benchmark": "model_step",
        "model": path.name,
        "python_us": round(time_python(model, vocab_size), 1),
        "results": results,
        "load": os.getloadavg()[0],
        "kernels": ops.library_description(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
