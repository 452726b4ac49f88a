"""API-server CPU of a streamed token, in the real process, with an engine core whose model costs nothing.

    python -m benchmarks.api_overhead [--streams 1,32,128] [--runs 3]

The real HTTP server with its real sockets; behind it the real engine core around a model that sleeps through each step
(2.5 ms at 1 stream, 25 ms at 32, 80 ms at 128), so that every token is a hand-over of its own. The text is plain
English, the tokenizer the built-in model's. Prints a JSON line for each number of streams: CPU microseconds of the
API-server process for each streamed token, of /v1/completions and /v1/chat/completions, how many events a token gave
(1.0 is honest), and milliseconds from a request's start to its first token beyond the step. The goal is 60 us at 32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import uvloop

from benchmarks.free_model import cpu_seconds, serve_engine
from benchmarks.http_load import Answer, complete
from serve.config import ServerConfig, read_environment
from serve.entrypoints.flags import build_parser, config_from_flags, parse_flags
from serve.entrypoints.listener import bind_listener
from serve.entrypoints.run_server import run_server
from serve.gguf import read_gguf_header
from serve.launch import EngineProcess, HandshakeLink
from serve.log import decorate_process, setup_logging
from serve.model_store import resolve_model
from serve.renderers.gguf_vocab import build_gguf_tokenizer
from serve.renderers.tokenizer import FastTokenizer
from serve.wire import sockets

MODEL = "smollm2-135m-instruct"
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps until the sun comes up again. "
STEP_SECONDS = {1: 0.0025, 8: 0.0085, 32: 0.025, 128: 0.08}
NUM_TOKENS = {1: 1000, 8: 400, 32: 150, 128: 60}


def run_api_server(port: int, step_seconds: float) -> None:
    """Run the API server with the free engine core as its child."""
    parsed = parse_flags(build_parser(), [MODEL, "--port", str(port), "--disable-uvicorn-access-log"])
    del parsed.version
    config, environment = config_from_flags(parsed), read_environment()
    decorate_process("APIServer", color=False)
    setup_logging("warning")
    listener = bind_listener(config.server)
    directory = sockets.make_endpoint_dir(Path(tempfile.gettempdir()))
    link = HandshakeLink(directory)
    command = [sys.executable, "-m", "benchmarks.api_overhead", "--engine", link.endpoint]
    child = subprocess.Popen([*command, "--step-seconds", str(step_seconds)])
    process = EngineProcess(child, directory, link, death_pipe=os.open(os.devnull, os.O_RDONLY))
    try:
        run_server(config, environment, listener, process=process)
    finally:
        process.kill()


def run_engine(endpoint: str, step_seconds: float) -> None:
    """Run the engine core, whose tokens are TEXT over and over."""
    path = resolve_model(MODEL, None, read_environment())
    tokenizer = FastTokenizer(build_gguf_tokenizer(read_gguf_header(str(path)).metadata))
    serve_engine(endpoint, tokenizer.encode(TEXT, add_special_tokens=False), seconds=step_seconds)


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return when the server is ready."""
    while True:
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(url + "/health"):
                return
        except OSError:
            time.sleep(0.05)


async def run_streams(url: str, num_streams: int, num_tokens: int, *, is_chat: bool) -> list[Answer]:
    """Stream num_tokens on each of num_streams connections at once."""
    body: dict[str, object] = {"model": MODEL, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "Once upon a time"}
    return await asyncio.gather(*(complete(url, body) for _ in range(num_streams)))


def measure(url: str, pid: int, num_streams: int, *, is_chat: bool) -> dict[str, float]:
    """Give the figures of one round."""
    num_tokens = NUM_TOKENS[num_streams]
    start = cpu_seconds(pid)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(run_streams(url, num_streams, num_tokens, is_chat=is_chat))
    seconds = cpu_seconds(pid) - start
    assert not any(answer.error for answer in answers), answers[0].error
    total = sum(answer.num_tokens for answer in answers)
    firsts = [answer.first - STEP_SECONDS[num_streams] for answer in answers]
    return {
        "us_per_token": seconds / total * 1e6,
        "events_per_token": sum(len(answer.times) for answer in answers) / total,
        "ttft_beyond_step_ms": statistics.median(firsts) * 1e3,
    }


def measure_server(num_streams: int, num_runs: int) -> dict[str, dict[str, float]]:
    """Start a server and give the median figures of both APIs."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "benchmarks.api_overhead", "--port", str(port)]
    process = subprocess.Popen([*command, "--step-seconds", str(STEP_SECONDS[num_streams])])
    try:
        wait_ready(url, process)
        results = {}
        for name in ("completions", "chat"):
            runs = [measure(url, process.pid, num_streams, is_chat=name == "chat") for _ in range(num_runs + 1)][1:]
            results[name] = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        return results
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """Give a port that nobody listens on now."""
    with bind_listener(ServerConfig(port=0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    """Measure every number of streams and print one JSON line each."""
    parser = argparse.ArgumentParser(description="API-server CPU of a streamed token.")
    parser.add_argument("--streams", default="1,32,128")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--step-seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        run_engine(arguments.engine, arguments.step_seconds)
        return
    if arguments.port:
        run_api_server(arguments.port, arguments.step_seconds)
        return
    for num_streams in map(int, arguments.streams.split(",")):
        result = {
            "benchmark": "api_overhead",
            "streams": num_streams,
            **measure_server(num_streams, arguments.runs),
            "load": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
