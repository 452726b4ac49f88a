"""Engine-core time of a step outside the model: schedule, inputs, sampling glue, update, encoding, sockets.

    python -m benchmarks.step_overhead [--batches 1,8,32,128] [--waiting 0] [--model-ms 2] [--steps 800] [--runs 3]

A real engine-core process with all its threads, sockets and the real worker; only the model costs nothing: it sleeps
for --model-ms, as a real one computes without the interpreter's lock, and gives ready logits of a vocabulary of 512, so
that the argmax costs nothing either. Every request decodes one token a step. With --waiting more requests wait behind a
full batch.

Prints a JSON line for each batch size: CPU microseconds a step of each thread and of the whole process, and the wall
microseconds of a step beyond the model's, which is what nothing overlaps (medians of the runs). The goals for the whole
process are 250 us at batch 1 and 600 us at batch 32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.free_model import FreeModel, cpu_seconds, new_engine, print_thread_ids
from serve.checkpoint import Checkpoint, ModelArch
from serve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from serve.sampling_params import SamplingParams
from serve.wire import sockets
from serve.wire.codec import MsgpackDecoder, MsgpackEncoder
from serve.wire.frontend import EngineCoreOutputs, EngineCoreRequest, EngineInit, RequestType

VOCAB_SIZE = 512
MAX_MODEL_LEN = 8192
PROMPT_TOKENS = 64
WARM_UP_STEPS = 200
THREADS = {
    "MainThread": "schedule_update",
    "worker": "inputs_sampling",
    "EngineCoreOutput": "encode_send",
    "EngineCoreInput": "receive",
}


def make_init(batch: int, addresses: list[str]) -> EngineInit:
    """Give the orders of an engine core that runs batch requests at once."""
    arch = ModelArch(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=MAX_MODEL_LEN,
        rope_theta=10_000.0,
    )
    checkpoint = Checkpoint(name="free", root=".", format="safetensors", weight_files=(), arch=arch)
    scheduler = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=batch, long_prefill_token_threshold=0)
    config = EngineConfig(
        model=ModelConfig(max_model_len=MAX_MODEL_LEN, dtype="float32"),
        cache=CacheConfig(num_gpu_blocks_override=batch * MAX_MODEL_LEN // 16 + 64),
        scheduler=scheduler,
    )
    return EngineInit(config, checkpoint, addresses[:1], addresses[1:])


def run_engine(batch: int, addresses: list[str], model_ms: float) -> None:
    """Run the engine core until it is terminated; its threads' ids go to stdout once they run."""
    proc = new_engine(make_init(batch, addresses), lambda: FreeModel(VOCAB_SIZE, seconds=model_ms / 1e3))
    print_thread_ids(list(THREADS))
    proc.run()


@dataclass
class Engine:
    """A running engine core and the client's ends of its sockets."""

    process: subprocess.Popen[str]
    send: Callable[[EngineCoreRequest], None]
    receive: Callable[[], EngineCoreOutputs]
    threads: dict[str, int]

    def cpu(self) -> dict[str, float]:
        """Give the CPU microseconds of the named threads and of all together."""
        pid = self.process.pid
        times = {THREADS[name]: cpu_seconds(pid, thread_id) for name, thread_id in self.threads.items()}
        return {name: seconds * 1e6 for name, seconds in (*times.items(), ("total", cpu_seconds(pid)))}


def measure(batch: int, num_waiting: int, num_steps: int, model_ms: float) -> dict[str, float]:
    """Give microseconds a step of one fresh engine core."""
    with tempfile.TemporaryDirectory() as base:
        directory = sockets.make_endpoint_dir(Path(base))
        addresses = [sockets.ipc_endpoint(directory, name) for name in ("in", "out")]
        context = sockets.new_context()
        router, pull = sockets.bind_router(context, addresses[0]), sockets.bind_pull(context, addresses[1])
        command = [sys.executable, "-m", "benchmarks.step_overhead", "--engine", json.dumps(addresses)]
        process = subprocess.Popen(
            [*command, "--batches", str(batch), "--model-ms", str(model_ms)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        identity = router.recv_multipart()[0]
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        engine = Engine(
            process,
            lambda request: router.send_multipart([identity, RequestType.ADD.value, *encoder.encode(request)]),
            lambda: decoder.decode(pull.recv_multipart()),
            json.loads(process.stdout.readline()),
        )
        try:
            figures = measure_steps(engine, batch, num_waiting, num_steps)
            figures["wall_beyond_model"] = figures.pop("wall") - model_ms * 1e3
            return figures
        finally:
            process.terminate()
            process.wait()
            router.close(linger=0)
            pull.close()
            context.term()


def measure_steps(engine: Engine, batch: int, num_waiting: int, num_steps: int) -> dict[str, float]:
    """Start the requests, let them get steady, and measure over num_steps steps."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS)
    for index in range(batch + num_waiting):
        prompt = [(index * 7919 + i) % VOCAB_SIZE for i in range(PROMPT_TOKENS)]
        engine.send(EngineCoreRequest(f"chatcmpl-{index:032x}-{index:08x}", prompt, params, float(index)))

    def run_steps(wanted: int) -> int:
        count = 0
        while count < wanted:
            message = engine.receive()
            count += len(message.outputs) == batch
        return count

    run_steps(WARM_UP_STEPS)
    start, start_cpu = time.perf_counter(), engine.cpu()
    count = run_steps(num_steps)
    seconds, end_cpu = time.perf_counter() - start, engine.cpu()
    result = {name: (end_cpu[name] - start_cpu[name]) / count for name in start_cpu}
    return {**result, "wall": seconds / count * 1e6}


def main() -> None:
    """Measure every batch size and print one JSON line each."""
    parser = argparse.ArgumentParser(description="Engine-core time of a step outside the model.")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--model-ms", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--engine", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    batches = [int(text) for text in arguments.batches.split(",")]
    if arguments.engine:
        run_engine(batches[0], arguments.engine, arguments.model_ms)
        return
    for batch in batches:
        runs = [measure(batch, arguments.waiting, arguments.steps, arguments.model_ms) for _ in range(arguments.runs)]
        result = {
            "benchmark": "step_overhead",
            "batch": batch,
            "waiting": arguments.waiting,
            "model_ms": arguments.model_ms,
            "us": {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]},
            "total_spread": [round(pick(run["total"] for run in runs), 1) for pick in (min, max)],
            "load": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
