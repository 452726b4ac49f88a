"""Cost of one scheduler step (schedule and update_from_output), without a model.

    python benchmarks/scheduler_step.py

Decode steps of 1 and 32 running requests with 10, 1,000 and 10,000 waiting ones behind a full batch, with the next
step scheduled ahead as a server does it. Prints a JSON line: microseconds, median and spread of the runs' medians.
The goals are 40 us at batch 1 and 150 us at batch 32, and no growth with the number waiting.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from collections import deque

from serve.config import SchedulerConfig
from serve.core.block_hash import BlockHasher
from serve.core.kv_cache_manager import KVCacheManager
from serve.core.request import Request
from serve.core.scheduler import Scheduler
from serve.sampling_params import SamplingParams
from serve.wire.step import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
PROMPT_TOKENS = 512
NUM_STEPS = 1000
NUM_RUNS = 5


def make_scheduler(num_running: int, num_waiting: int) -> Scheduler:
    """Fill a scheduler: num_running requests fit, the rest wait behind max_num_seqs."""
    kv = KVCacheManager(
        64 + (num_running + 1) * MAX_MODEL_LEN // BLOCK_SIZE,
        BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_step_tokens=8192,
        hasher=BlockHasher(BLOCK_SIZE, algorithm="sha256", domain="bench", seed="bench"),
    )
    config = SchedulerConfig(max_num_batched_tokens=32768, max_num_seqs=num_running, long_prefill_token_threshold=0)
    scheduler = Scheduler(config, kv, max_model_len=MAX_MODEL_LEN)
    params = SamplingParams(max_tokens=MAX_MODEL_LEN)
    for index in range(num_running + num_waiting):
        length = PROMPT_TOKENS if index < num_running else 32
        prompt = [(index * 7919 + i) % 49152 for i in range(length)]
        request = Request(f"request-{index:06d}", params, prompt, length)
        kv.hash_prompt(request)
        scheduler.add_request(request)
    return scheduler


def fake_result(step: SchedulerOutput) -> ModelRunnerOutput:
    """Give every request of a step one token."""
    req_ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(req_ids, [[i + 1] for i in range(len(req_ids))])


def measure(num_running: int, num_waiting: int) -> list[float]:
    """Give the microseconds of each steady step: schedule the next one, then fold in the oldest."""
    scheduler = make_scheduler(num_running, num_waiting)
    in_flight = deque([scheduler.schedule()])
    times = []
    gc.collect()
    gc.freeze()
    for _ in range(NUM_STEPS):
        result = fake_result(in_flight[0])
        start = time.perf_counter_ns()
        in_flight.append(scheduler.schedule())
        scheduler.update_from_output(in_flight.popleft(), result)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times[10:]


def main() -> None:
    """Measure all sizes and print one JSON line each."""
    for num_running in (1, 32):
        for num_waiting in (10, 1000, 10_000):
            runs = [measure(num_running, num_waiting) for _ in range(NUM_RUNS)]
            medians = [statistics.median(run) for run in runs]
            result = {
                "benchmark": "scheduler_step",
                "num_running": num_running,
                "num_waiting": num_waiting,
                "median_us": round(statistics.median(medians), 1),
                "spread_us": [round(min(medians), 1), round(max(medians), 1)],
                "p99_us": round(statistics.median(sorted(run)[int(len(run) * 0.99)] for run in runs), 1),
                "python": platform.python_version(),
                "machine": platform.machine(),
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
