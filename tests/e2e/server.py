"""A server under test: the real program in its own processes, spoken to over real sockets."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.source_tree import ROOT
from tests.waiting import wait_until

BUILT_IN = "smollm2-135m-instruct"
EMBEDDING_MODEL = "all-minilm-l6-v2"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 15.0
REQUEST_LIMIT_S = 120.0


def free_port() -> int:
    """Give a port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


PR_SET_PDEATHSIG = 1


def _die_with_the_tests() -> None:
    """Ask the kernel for SIGTERM when the test process dies, so that an interrupted run leaves no server."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class ServerEnded(AssertionError):
    """The program ended where it should have become ready."""


class Server:
    """One running `serve` with its log, its processes and an HTTP client."""

    def __init__(self, *flags: str, model: str = BUILT_IN, env: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log_path = Path(tempfile.mkstemp(prefix="serve-log-")[1])
        command = [sys.executable, "-m", "serve", model, "--port", str(self.port), *flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "NO_COLOR": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_the_tests,
            )
        self.client = httpx.Client(base_url=self.base_url, timeout=REQUEST_LIMIT_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> Server:
        """Return when /health answers 200; fail with the log when the process ends before that."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise ServerEnded(f"serve ended with {self.process.returncode}:\n{self.log_tail()}")
            return self.status("/health") == 200

        try:
            wait_until(ready, limit_s, "the server is ready")
        except ServerEnded:
            raise
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log_tail()}") from None
        return self

    def status(self, path: str) -> int | None:
        """Give the status of a GET, or None when nothing answers."""
        try:
            return self.client.get(path, timeout=5).status_code
        except httpx.TransportError:
            return None

    def log(self) -> str:
        """Give what the processes have written so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def log_tail(self) -> str:
        """Give the last lines of the log that are not about health probes."""
        lines = [line for line in self.log().splitlines() if '"GET /health' not in line]
        return "\n".join(lines[-25:])

    def tree(self) -> list[psutil.Process]:
        """Give the started process and all its descendants that are alive."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def engine_core(self) -> psutil.Process:
        """Give the engine-core process."""
        return next(p for p in self.tree() if p.cmdline() and p.cmdline()[0].startswith("SERVE::EngineCore"))

    def terminate(self) -> None:
        """Send SIGTERM to the program, as a supervisor does."""
        self.process.send_signal(signal.SIGTERM)

    def wait_exit(self, limit_s: float = STOP_LIMIT_S) -> int:
        """Give the exit code; fail when the program still runs after limit_s."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s:\n{self.log_tail()}") from None

    def close(self) -> None:
        """Stop the program and whatever it left, and remove the log."""
        self.client.close()
        tree = self.tree()
        if self.process.poll() is None:
            self.terminate()
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for process in tree:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
        self.process.wait()
        self.log_path.unlink(missing_ok=True)

    def metrics(self) -> dict[str, float]:
        """Give all samples, summed over labels that are not part of the name."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Give the samples of one metric with their labels."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return [(s.labels, s.value) for f in families for s in f.samples if s.name == name]

    def metric(self, tail: str) -> float:
        """Give one value by the tail of its name, without the prefix."""
        return _by_tail(self.metrics(), tail)

    def wait_idle(self, limit_s: float = 10.0) -> None:
        """Return when, in one scrape, no request runs or waits and no cache block is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

        def is_idle() -> bool:
            found = self.metrics()
            return all(_by_tail(found, name) == 0 for name in names)

        wait_until(is_idle, limit_s, "the engine is idle")


def _by_tail(found: dict[str, float], tail: str) -> float:
    matching = [value for name, value in found.items() if re.fullmatch(rf"[a-z]+:{tail}", name)]
    assert len(matching) == 1, f"{tail}: {sorted(found)}"
    return matching[0]


@contextmanager
def running(*flags: str, model: str = BUILT_IN, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start a server, wait until it is ready, stop it at the end."""
    with Server(*flags, model=model, env=env) as server:
        yield server.wait_ready()
