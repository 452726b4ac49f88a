"""Cost of the wire between API server and engine core.

    python -m benchmarks.wire_cost

Encode and decode of one step's outputs (1 and 32 requests, with and without 5 logprobs) and of a request with 512
prompt tokens, and the round trip of a step's message through two sockets. Prints a JSON line: microseconds, median
of the runs.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from serve.sampling_params import SamplingParams
from serve.wire.codec import MsgpackDecoder, MsgpackEncoder
from serve.wire.frontend import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, LogprobsLists, SchedulerStats
from serve.wire.sockets import bind_pull, connect_push, ipc_endpoint, make_endpoint_dir, new_context

NUM_CALLS = 2000
NUM_RUNS = 5


def step_message(num_requests: int, num_logprobs: int | None) -> EngineCoreOutputs:
    """Give one step's message: a token for each request."""
    table = None
    if num_logprobs is not None:
        shape = (1, num_logprobs + 1)
        table = LogprobsLists(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.ones(1, np.int32))
    outputs = [EngineCoreOutput(f"chatcmpl-{i:032x}-{i:032x}", [1000 + i], table) for i in range(num_requests)]
    return EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats(num_running_reqs=num_requests))


def measure(call: Callable[[], object]) -> float:
    """Give microseconds a call, the median of the runs."""
    runs = []
    for _ in range(NUM_RUNS + 1):
        start = time.perf_counter()
        for _ in range(NUM_CALLS):
            call()
        runs.append((time.perf_counter() - start) / NUM_CALLS * 1e6)
    return round(statistics.median(runs[1:]), 2)


def measure_round_trip(message: EngineCoreOutputs) -> float:
    """Give microseconds to encode, send, receive and decode a message in one process."""
    with tempfile.TemporaryDirectory() as base:
        context, endpoint = new_context(), ipc_endpoint(make_endpoint_dir(Path(base)), "output")
        pull = bind_pull(context, endpoint)
        push = connect_push(context, endpoint)
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)

        def call() -> EngineCoreOutputs:
            push.send_multipart(encoder.encode(message))
            return decoder.decode(pull.recv_multipart())

        result = measure(call)
        push.close()
        pull.close()
        context.term()
    return result


def main() -> None:
    """Measure everything and print one JSON line."""
    encoder = MsgpackEncoder()
    results: dict[str, dict[str, float]] = {}
    for num_requests, num_logprobs in ((1, None), (32, None), (32, 5)):
        message = step_message(num_requests, num_logprobs)
        frames = [bytes(f) for f in encoder.encode(message)]
        decoder = MsgpackDecoder(EngineCoreOutputs)
        results[f"step_{num_requests}" + ("_logprobs" if num_logprobs else "")] = {
            "bytes": sum(map(len, frames)),
            "encode_us": measure(lambda message=message: encoder.encode(message)),
            "decode_us": measure(lambda decoder=decoder, frames=frames: decoder.decode(frames)),
            "round_trip_us": measure_round_trip(message),
        }
    request = EngineCoreRequest("chatcmpl-0", list(range(1000, 1512)), SamplingParams(), 0.0)
    frames = [bytes(f) for f in encoder.encode(request)]
    request_decoder = MsgpackDecoder(EngineCoreRequest)
    results["request_512"] = {
        "bytes": sum(map(len, frames)),
        "encode_us": measure(lambda: encoder.encode(request)),
        "decode_us": measure(lambda: request_decoder.decode(frames)),
    }
    print(json.dumps({"benchmark": "wire_cost", "python": platform.python_version(), "results": results}))


if __name__ == "__main__":
    main()
