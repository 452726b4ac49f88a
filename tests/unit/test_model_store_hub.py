"""Hub ids of serve/model_store.py against a hub on this machine: fetched, found again without it, never waited for."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from serve.errors import ExitCode
from serve.model_store import LOOK_UP_SECONDS

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "run.py": b"code", "pytorch_model.bin": b"code"}
START_SECONDS = 20.0


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a download needs, for one model: owner/tiny."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        name = path.removeprefix(f"/owner/tiny/resolve/{SHA}/")
        if re.fullmatch(r"/api/models/owner/tiny(/revision/main)?", path):
            self._send(200, json.dumps({"id": "owner/tiny", "sha": SHA, "siblings": SIBLINGS}).encode(), with_body)
        elif path == f"/api/models/owner/tiny/tree/{SHA}":
            self._send(200, json.dumps(TREE).encode(), with_body)
        elif name in FILES:
            self._send(200, FILES[name], with_body)
        else:
            self._send(404, b"{}", with_body, error="RevisionNotFound" if "owner/tiny" in path else "RepoNotFound")

    def _send(self, status: int, body: bytes, with_body: bool, error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hash(body):x}"')
        self.send_header("X-Repo-Commit", SHA)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


SIBLINGS = [{"rfilename": name} for name in FILES]
TREE = [{"type": "file", "path": name, "size": len(body), "oid": "0" * 40} for name, body in FILES.items()]


@contextmanager
def running_hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def pull(endpoint: str, home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `serve pull` with this hub and nothing of the user's own settings for it."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-m", "serve", "pull", *arguments],
        env=inherited | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)} | more,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_model_is_fetched_without_code_and_found_again_without_the_hub(tmp_path: Path) -> None:
    with running_hub() as endpoint:
        first = pull(endpoint, tmp_path, "owner/tiny")
    assert first.returncode == ExitCode.OK, first.stderr
    assert "looking up owner/tiny on the hub" in first.stderr.splitlines()[0]
    folder = Path(first.stdout.strip())
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }
    unreachable = pull(endpoint, tmp_path, "owner/tiny")
    assert (unreachable.returncode, unreachable.stdout) == (ExitCode.OK, first.stdout), unreachable.stderr
    assert "using the copy in its cache" in unreachable.stderr
    offline = pull(endpoint, tmp_path, "owner/tiny", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout, offline.stderr) == (ExitCode.OK, first.stdout, "")


def test_answer_of_the_hub_is_told_in_one_line(tmp_path: Path) -> None:
    with running_hub() as endpoint:
        no_model = pull(endpoint, tmp_path, "owner/other")
        no_revision = pull(endpoint, tmp_path, "owner/tiny", "--revision", "other")
    for done, cause in ((no_model, "RepositoryNotFoundError"), (no_revision, "RevisionNotFoundError")):
        assert done.returncode == ExitCode.MODEL
        assert cause in done.stderr.splitlines()[-1]
        assert "check owner/name, --revision" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


def test_hub_that_refuses_connections_is_named_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done = pull(f"http://127.0.0.1:{port}", tmp_path, "owner/tiny")
    assert done.returncode == ExitCode.MODEL
    assert "the hub cannot be reached (Connect" in done.stderr.splitlines()[-1]
    assert "HF_HUB_OFFLINE=1" in done.stderr.splitlines()[-1]


def test_hub_that_never_answers_is_given_up_after_a_few_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        done = pull(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, "owner/tiny")
        seconds = time.monotonic() - begin
    assert done.returncode == ExitCode.MODEL
    assert "the hub cannot be reached" in done.stderr.splitlines()[-1]
    assert seconds < LOOK_UP_SECONDS + START_SECONDS
