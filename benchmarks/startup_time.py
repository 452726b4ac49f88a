"""Measures how long `serve` takes from the command to /health 200, and what memory its processes take.

    .venv/bin/python benchmarks/startup_time.py [MODEL] [--runs 5] [--kv-tokens 16384] [-- FLAGS...]

The model is in the cache already. A start without packed weights (cold) and one that maps them (warm) take turns; one
of each fills the disk cache and is not counted. Memory is read when the server is ready and again when so many tokens
have been computed and lie in the KV cache. Prints one JSON line: seconds of each run for the first HTTP
answer (/live) and for readiness (/health), their medians, processor seconds till then, MiB of resident (RSS) and
proportional (PSS) memory of each process, machine and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from serve.config import read_environment

LIMIT_S = 120.0
POLL_S = 0.01
# Small models are packed at every start; nothing is stored then.
STORE_LIMIT_S = 10.0
PROMPT_TOKENS = 1000


def free_port() -> int:
    """Give a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def seconds_until_200(url: str, begin: float, process: subprocess.Popen[bytes]) -> float:
    """Ask until the answer is 200; give the seconds since begin."""
    while time.monotonic() - begin < LIMIT_S:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return time.monotonic() - begin
        except OSError:  # refused, not ready, or too slow on a busy machine
            time.sleep(POLL_S)
    raise SystemExit(f"{url} was not 200 within {LIMIT_S} s")


@dataclass
class Start:
    """One start: seconds to the first answer and to readiness, processor time till then, memory by moment."""

    live_s: float
    ready_s: float
    cpu_s: float
    memory: dict[str, list[dict[str, int | str]]]


def memory(process: subprocess.Popen[bytes]) -> list[dict[str, int | str]]:
    """Give the MiB of the server and its children, and of all together."""
    root = psutil.Process(process.pid)
    rows: list[dict[str, int | str]] = []
    for one in (root, *root.children(recursive=True)):
        full = one.memory_full_info()
        title = one.cmdline()[0] if one.cmdline()[0].startswith("SERVE::") else "API server"
        rows.append({"process": title, "rss_mib": full.rss >> 20, "pss_mib": full.pss >> 20})
    rows.append({"process": "all"} | {key: sum(int(row[key]) for row in rows) for key in ("rss_mib", "pss_mib")})
    return rows


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """Give the processor time that the server and its children have used; a busy machine does not change it much."""
    root = psutil.Process(process.pid)
    return sum(sum(one.cpu_times()[:2]) for one in (root, *root.children(recursive=True)))


def fill(base: str, num_tokens: int) -> None:
    """Compute so many tokens in prompts that share nothing, so that all of them stay in the cache."""
    with urllib.request.urlopen(f"{base}/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    source = random.Random(0)
    while num_tokens > 0:
        length = min(PROMPT_TOKENS, num_tokens)
        prompt = [source.randrange(1000, 30000) for _ in range(length)]
        body = json.dumps({"model": name, "prompt": prompt, "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{base}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            answer.read()
        num_tokens -= length


def measure(model: list[str], flags: list[str], cache: Path, *, kv_tokens: int) -> Start:
    """Start a server once."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "serve", *model, "--port", str(port), *flags]
    begin = time.monotonic()
    environment = {**os.environ, "SERVE_CACHE_DIR": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        live = seconds_until_200(f"{base}/live", begin, process)
        ready = seconds_until_200(f"{base}/health", begin, process)
        cpu = cpu_seconds(process)
        found = {"ready": memory(process)}
        if kv_tokens:
            fill(base, kv_tokens)
            found[f"{kv_tokens} tokens"] = memory(process)
        while not list((cache / "packed").glob("*.packed")) and time.monotonic() - begin < STORE_LIMIT_S:
            time.sleep(POLL_S)
    finally:
        process.terminate()
        process.wait()
    return Start(round(live, 2), round(ready, 2), round(cpu, 2), found)


def summary(starts: list[Start]) -> dict[str, object]:
    """Give what the report says of starts of one kind; memory is that of the last one."""
    live, ready = [start.live_s for start in starts], [start.ready_s for start in starts]
    return {
        "live_s": live,
        "ready_s": ready,
        "live_median_s": statistics.median(live),
        "ready_median_s": statistics.median(ready),
        "cpu_s": [start.cpu_s for start in starts],
        "memory": starts[-1].memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model argument of serve (default: the built-in model)")
    parser.add_argument("--runs", type=int, default=5, help="counted runs, at least 3 (default: 5)")
    parser.add_argument("--kv-tokens", type=int, default=16384, help="tokens in the KV cache (default: 16384; 0: none)")
    parser.add_argument("flags", nargs="*", help="flags for serve, after --")
    parsed = parser.parse_args()
    if parsed.runs < 3:
        parser.error("--runs must be at least 3")
    model = [parsed.model] if parsed.model else []
    starts: dict[str, list[Start]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="serve-startup-") as folder:
        cache = Path(folder)
        (cache / "models").symlink_to(read_environment().cache_dir / "models")
        for index in range(parsed.runs + 1):
            shutil.rmtree(cache / "packed", ignore_errors=True)
            for kind in starts:
                is_last = index == parsed.runs
                start = measure(model, parsed.flags, cache, kv_tokens=parsed.kv_tokens if is_last else 0)
                if index > 0:
                    starts[kind].append(start)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    report = {
        "benchmark": "startup_time",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "model": parsed.model or "built-in",
        "flags": parsed.flags,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        **{kind: summary(found) for kind, found in starts.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
