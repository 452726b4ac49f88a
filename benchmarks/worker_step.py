"""Time of a worker step outside the model's forward pass: state updates, inputs, sampling, output.

    python -m benchmarks.worker_step

A model that returns prepared logits stands in for the real one; every request decodes one token a step. Times are CPU
time of the one thread that computes, so that a busy machine does not count. What all of the engine core may take
beside the model is in benchmarks.step_overhead. Prints one line a case and appends a JSON line to
benchmarks/results/worker_step.jsonl.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from serve.kernels.attention import AttentionMetadata, KVCache
from serve.models.layers.embedding import PromptEmbeds
from serve.sampling_params import SamplingParams
from serve.wire.step import CachedRequestData, NewRequestData, SchedulerOutput
from serve.worker.logits_processors import ProcessorChain
from serve.worker.model_runner import ModelRunner, RunnerLimits

VOCAB = 49152
PROMPT_LEN = 128
NUM_WARM_UP = 20
NUM_STEPS = 200
NUM_RUNS = 3
RESULTS = Path(__file__).parent / "results" / "worker_step.jsonl"
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "penalties": SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.1),
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top_k": SamplingParams(temperature=0.8, top_k=50, seed=1),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


class PreparedModel:
    """Gives the same logits in every step, copied as a real head would write them anew."""

    def __init__(self, num_reqs: int) -> None:
        rng = np.random.default_rng(0)
        self._logits = torch.from_numpy((rng.standard_normal((num_reqs, VOCAB)) * 3).astype(np.float32))
        self._fresh = torch.empty_like(self._logits)
        self._hidden = torch.zeros((num_reqs * PROMPT_LEN, 1))
        self.seconds = 0.0

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        meta: AttentionMetadata,
        prompt_embeds: PromptEmbeds | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        return self._hidden[: meta.num_tokens if rows is None else len(rows)]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        start = time.thread_time()
        self._fresh.copy_(self._logits)
        self.seconds += time.thread_time() - start
        return self._fresh


def measure(params: SamplingParams, num_reqs: int) -> list[float]:
    """Give the median seconds of a step, without the model, for each run."""
    model = PreparedModel(num_reqs)
    limits = RunnerLimits(num_reqs, max(2048, num_reqs * PROMPT_LEN), 8192, 16, VOCAB)
    runner = ModelRunner(model, [], limits, logprobs_mode="raw_logprobs", processors=ProcessorChain([]))
    req_ids = [f"cmpl-{i}" for i in range(num_reqs)]
    prompt = np.random.default_rng(1).integers(0, VOCAB, PROMPT_LEN).tolist()
    new = [
        NewRequestData(req_id, prompt, PROMPT_LEN, params, list(range(1, PROMPT_LEN // 16 + 1)), 0)
        for req_id in req_ids
    ]
    first = dict.fromkeys(req_ids, PROMPT_LEN)
    runner.execute_model(SchedulerOutput(0, new, CachedRequestData(), first, num_reqs * PROMPT_LEN))
    runner.sample_tokens(None)
    medians = []
    computed = PROMPT_LEN
    for _ in range(NUM_RUNS):
        times = []
        for _ in range(NUM_WARM_UP + NUM_STEPS):
            new_blocks = [[1] if computed % 16 == 0 else [] for _ in req_ids]
            cached = CachedRequestData(req_ids, new_blocks, [computed] * num_reqs)
            plan = SchedulerOutput(0, [], cached, dict.fromkeys(req_ids, 1), num_reqs)
            model.seconds = 0.0
            start = time.thread_time()
            runner.execute_model(plan)
            runner.sample_tokens(None)
            times.append(time.thread_time() - start - model.seconds)
            computed += 1
        medians.append(statistics.median(times[NUM_WARM_UP:]))
    return medians


def main() -> None:
    torch.set_num_threads(1)
    RESULTS.parent.mkdir(exist_ok=True)
    for name, params in CASES.items():
        for num_reqs in (1, 32):
            medians = [round(seconds * 1e3, 4) for seconds in measure(params, num_reqs)]
            row = {
                "benchmark": "worker_step",
                "case": name,
                "num_reqs": num_reqs,
                "ms_median": statistics.median(medians),
                "ms_runs": medians,
                "load": os.getloadavg()[0],
                "torch": torch.__version__,
                "numpy": np.__version__,
                "machine": platform.machine(),
            }
            print(f"{name:12} num_reqs={num_reqs:3} {row['ms_median']:.3f} ms  runs={medians} load={row['load']:.1f}")
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
