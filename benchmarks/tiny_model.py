"""The whole path end to end over HTTP with a model that is hardly there: 2 layers, hidden 64, the real vocabulary.

    python -m benchmarks.tiny_model [--concurrency 1,32,256] [--rounds 3]

Writes a checkpoint with random weights and the built-in model's tokenizer, starts the server on it and streams short
completions (4 words in, 16 tokens out). Prints a JSON line for each concurrency: requests and tokens a second, first
token and gaps in milliseconds, and CPU microseconds a token of the API server and of the engine core.
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
from pathlib import Path

import psutil

from benchmarks.api_overhead import MODEL, free_port, wait_ready
from benchmarks.free_model import cpu_seconds
from benchmarks.http_load import WORKLOADS, plan, run_round
from serve.config import read_environment
from serve.gguf import read_gguf_header
from serve.model_store import resolve_model
from serve.renderers.gguf_vocab import build_gguf_tokenizer

NAME = "tiny"


def write_checkpoint(folder: Path) -> None:
    """Write the description of the model and its tokenizer; the weights are made up while loading."""
    parts = build_gguf_tokenizer(read_gguf_header(str(resolve_model(MODEL, None, read_environment()))).metadata)
    parts.backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": parts.backend.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))


def measure(url: str, pids: dict[str, int], concurrency: int, *, seed: int) -> dict[str, float]:
    """Give the figures of one round."""
    start = {name: cpu_seconds(pid) for name, pid in pids.items()}
    streams = plan(WORKLOADS["tiny"], NAME, concurrency, seed=seed)
    figures = run_round(url, streams)
    assert not figures["errors"], f"{figures['errors']} requests failed"
    num_tokens = sum(WORKLOADS["tiny"].num_tokens for bodies in streams for _ in bodies)
    cpu = {f"{name}_us_per_token": (cpu_seconds(pid) - start[name]) / num_tokens * 1e6 for name, pid in pids.items()}
    return {**figures, **cpu}


def main() -> None:
    """Start the server, measure every concurrency and print one JSON line each."""
    parser = argparse.ArgumentParser(description="The whole path with a model that is hardly there.")
    parser.add_argument("--concurrency", default="1,32,256")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as base:
        write_checkpoint(Path(base))
        flags = ["--load-format", "dummy", "--served-model-name", NAME, "--disable-uvicorn-access-log"]
        command = [sys.executable, "-m", "serve", base, "--port", str(port), *flags]
        process = subprocess.Popen(command, env={**os.environ, "SERVE_LOG_LEVEL": "warning"})
        try:
            wait_ready(url, process)
            engine = psutil.Process(process.pid).children()[0]
            pids = {"api": process.pid, "engine": engine.pid}
            for concurrency in map(int, arguments.concurrency.split(",")):
                rounds = [measure(url, pids, concurrency, seed=i) for i in range(arguments.rounds + 1)][1:]
                result = {
                    "benchmark": "tiny_model",
                    "concurrency": concurrency,
                    **{name: round(statistics.median(r[name] for r in rounds), 2) for name in rounds[0]},
                    "load": round(os.getloadavg()[0], 1),
                    "python": platform.python_version(),
                    "machine": platform.machine(),
                }
                print(json.dumps(result), flush=True)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
