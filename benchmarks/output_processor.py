"""Cost of the output path in the front end, per token: text, stop strings and logprobs, without the wire.

    python -m benchmarks.output_processor [MODEL.gguf]

32 streaming requests, one token each a step, with a reader that takes every hand-over. The tokenizer is that of the
GGUF file, or one of bytes without an argument. Prints a JSON line: microseconds a token, median and spread of the
runs. The goal is 25 us for plain text at batch 32.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import sys
import time

import numpy as np

from serve.engine.output_processor import ClientRequest, OutputProcessor, RequestOutputCollector
from serve.engine.stats import EngineStats
from serve.gguf import read_gguf_header
from serve.renderers.gguf_vocab import build_gguf_tokenizer
from serve.renderers.tokenizer import FastTokenizer, Tokenizer
from serve.sampling_params import OutputKind, SamplingParams
from serve.wire.frontend import EngineCoreOutput, EngineCoreRequest, LogprobsLists
from tests.fakes import ByteTokenizer

BATCH = 32
NUM_STEPS = 500
NUM_RUNS = 5
NUM_LOGPROBS = 5
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps until the sun comes up again. "

CASES = {
    "plain": SamplingParams(max_tokens=4096, output_kind=OutputKind.DELTA),
    "stop": SamplingParams(max_tokens=4096, output_kind=OutputKind.DELTA, stop=("\n\n", "<|end|>", "the end")),
    "final": SamplingParams(max_tokens=4096, output_kind=OutputKind.FINAL_ONLY),
    "logprobs": SamplingParams(max_tokens=4096, output_kind=OutputKind.DELTA, logprobs=NUM_LOGPROBS),
}


def load_tokenizer(path: str | None) -> Tokenizer:
    """Give the tokenizer of a GGUF file, or one of bytes."""
    if path is None:
        return ByteTokenizer()
    return FastTokenizer(build_gguf_tokenizer(read_gguf_header(path).metadata))


def run_once(tokenizer: Tokenizer, params: SamplingParams) -> float:
    """Give microseconds a token over NUM_STEPS steps of BATCH requests."""
    processor = OutputProcessor(tokenizer, stats=EngineStats(4096))
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    collectors = []
    for index in range(BATCH):
        request = EngineCoreRequest(f"request-{index}", token_ids, params, 0.0)
        collectors.append(RequestOutputCollector(params.output_kind))
        client = ClientRequest(f"client-{index}", collectors[-1], None)
        processor.add_request(request, client, index=0, arrival=time.monotonic())
    table = None
    if params.logprobs is not None:
        ids = np.array([token_ids[: NUM_LOGPROBS + 1]], np.int32)
        table = LogprobsLists(ids, -np.arange(NUM_LOGPROBS + 1, dtype=np.float32)[None], np.ones(1, np.int32))
    steps = [
        [EngineCoreOutput(f"request-{i}", [token_ids[(step + i) % len(token_ids)]], table) for i in range(BATCH)]
        for step in range(NUM_STEPS)
    ]
    gc.collect()
    start = time.perf_counter()
    for step in steps:
        processor.process_outputs(step, 1.0)
        for collector in collectors:
            collector.get_nowait()
    return (time.perf_counter() - start) / (NUM_STEPS * BATCH) * 1e6


def main() -> None:
    """Run every case and print one JSON line."""
    tokenizer = load_tokenizer(sys.argv[1] if len(sys.argv) > 1 else None)
    results = {}
    for name, params in CASES.items():
        run_once(tokenizer, params)
        times = [run_once(tokenizer, params) for _ in range(NUM_RUNS)]
        results[name] = {"us": round(statistics.median(times), 2), "spread": round(max(times) - min(times), 2)}
    print(json.dumps({"benchmark": "output_processor", "python": platform.python_version(), "per_token": results}))


if __name__ == "__main__":
    main()
