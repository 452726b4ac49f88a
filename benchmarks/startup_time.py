"""Measures how long `serve` takes from the command to /health 200, with the model already in the cache.

    .venv/bin/python benchmarks/startup_time.py [MODEL] [--runs 5] [-- FLAGS...]

One warm-up run fills the disk cache and is not counted. Prints one JSON line: seconds of each run for the first
HTTP answer (/live) and for readiness (/health), their medians, machine and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

LIMIT_S = 120.0
POLL_S = 0.01


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
        except (urllib.error.URLError, ConnectionError):
            time.sleep(POLL_S)
    raise SystemExit(f"{url} was not 200 within {LIMIT_S} s")


def measure(model: list[str], flags: list[str]) -> tuple[float, float]:
    """Start a server once; give the seconds to its first answer and to readiness."""
    port = free_port()
    command = [sys.executable, "-m", "serve", *model, "--port", str(port), *flags]
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        live = seconds_until_200(f"http://127.0.0.1:{port}/live", begin, process)
        ready = seconds_until_200(f"http://127.0.0.1:{port}/health", begin, process)
    finally:
        process.terminate()
        process.wait()
    return live, ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model argument of serve (default: the built-in model)")
    parser.add_argument("--runs", type=int, default=5, help="counted runs, at least 3 (default: 5)")
    parser.add_argument("flags", nargs="*", help="flags for serve, after --")
    parsed = parser.parse_args()
    if parsed.runs < 3:
        parser.error("--runs must be at least 3")
    model = [parsed.model] if parsed.model else []
    measure(model, parsed.flags)
    runs = [measure(model, parsed.flags) for _ in range(parsed.runs)]
    live, ready = [round(run[0], 2) for run in runs], [round(run[1], 2) for run in runs]
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
        "live_s": live,
        "ready_s": ready,
        "live_median_s": statistics.median(live),
        "ready_median_s": statistics.median(ready),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
