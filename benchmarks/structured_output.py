"""Cost of constraints: compiling one, a mask row, moving over a token, and the mask of a whole step.

    python benchmarks/structured_output.py [--model smollm2-135m-instruct]

The vocabulary is the model's own. Each answer is fed to its grammar as the model's tokenizer cuts it. Prints a JSON
line a case: milliseconds to compile, microseconds a row (median, worst) and a token; then the mask of steps with 1, 32
and 128 constrained requests.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from serve.checkpoint import load_checkpoint
from serve.config import read_environment
from serve.core.request import Request
from serve.core.structured_output.backend import LLGuidanceBackend
from serve.core.structured_output.compiler import default_threads
from serve.core.structured_output.manager import StructuredOutputManager
from serve.engine.vocabulary import build_vocabulary
from serve.model_store import resolve_model
from serve.renderers.tokenizer import Tokenizer, load_tokenizer
from serve.sampling_params import SamplingParams, StructuredOutputs

NUM_RUNS = 5
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["name", "age", "tags", "zip"],
    "additionalProperties": False,
}
WIDE = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(500)}}
CASES = {
    "json_schema": (
        StructuredOutputs("json_schema", json.dumps(PERSON)),
        '{"name": "John Smith", "age": 31, "tags": ["tall", "quiet one"], "zip": "12345"}',
    ),
    "json_object": (StructuredOutputs("json_object"), '{"a": [1, 2, {"b": "some text in here"}]}'),
    "500 properties": (StructuredOutputs("json_schema", json.dumps(WIDE)), '{"field_7": "x", "field_300": "y"}'),
    "regex": (StructuredOutputs("regex", r"[a-z]+@[a-z]+\.com"), "john@example.com"),
    "choice": (StructuredOutputs("choice", json.dumps([f"label {i}" for i in range(100)])), "label 42"),
    "grammar": (
        StructuredOutputs("grammar", 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'),
        "1+(22+3)+(4+(5))",
    ),
}


def timed(work: Callable[[], object]) -> float:
    """Give the seconds one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_case(backend: LLGuidanceBackend, constraint: StructuredOutputs, token_ids: list[int]) -> dict[str, float]:
    """Give the costs of one constraint over one answer."""
    compiling = [timed(lambda: backend.compile(constraint)) for _ in range(NUM_RUNS)]
    row = np.zeros(backend.mask_words, np.uint32)
    filling: list[float] = []
    moving: list[float] = []
    for _ in range(NUM_RUNS):
        grammar = backend.compile(constraint)
        for token_id in token_ids:
            filling.append(timed(partial(grammar.fill, row)))
            moving.append(timed(partial(grammar.accept, token_id)))
    return {
        "compile_ms": round(1e3 * statistics.median(compiling), 2),
        "row_us": round(1e6 * statistics.median(filling), 1),
        "worst_row_us": round(1e6 * max(filling), 1),
        "token_us": round(1e6 * statistics.median(moving), 1),
    }


def measure_step(manager: StructuredOutputManager, num_requests: int, prefix: list[int]) -> float:
    """Give the median microseconds of the mask of a step in which every request stands inside a string."""
    constraint, _ = CASES["json_schema"]
    params = SamplingParams(structured_outputs=constraint)
    requests = [Request(f"r{i}", params, [1], 1) for i in range(num_requests)]
    for request in requests:
        while request.constraint is None and not manager.start(request):
            while not manager.poll():
                time.sleep(0.001)
        assert request.constraint is not None, "the constraint was compiled above"
        for token_id in prefix:
            assert request.constraint.accept(token_id), "the answer fits its schema"
    times = [timed(lambda: manager.fill(requests)) for _ in range(50)]
    return round(1e6 * statistics.median(times), 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    path = resolve_model(parser.parse_args().model, None, read_environment())
    checkpoint = load_checkpoint(path)
    tokenizer: Tokenizer = load_tokenizer(checkpoint, None)
    vocabulary = build_vocabulary(tokenizer, checkpoint.eos_token_ids)
    start = time.perf_counter()
    backend = LLGuidanceBackend(vocabulary)
    setting = {"vocabulary": len(vocabulary.tokens), "python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps({"case": "vocabulary", "build_ms": round(1e3 * (time.perf_counter() - start), 1), **setting}))
    for name, (constraint, answer) in CASES.items():
        token_ids = tokenizer.encode(answer, add_special_tokens=False)
        print(json.dumps({"case": name, "tokens": len(token_ids), **measure_case(backend, constraint, token_ids)}))
    manager = StructuredOutputManager(lambda _: backend, num_buffers=2, num_threads=default_threads())
    manager.set_vocabulary(vocabulary)
    prefix = tokenizer.encode('{"name": "John', add_special_tokens=False)
    for num_requests in (1, 32, 128):
        print(json.dumps({"case": f"step of {num_requests}", "mask_us": measure_step(manager, num_requests, prefix)}))
    manager.shutdown()


if __name__ == "__main__":
    main()
