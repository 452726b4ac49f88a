"""`serve run-batch`: the server's answers in a file, one line a request, and runs that go on where one ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.e2e.client import choice_of, complete
from tests.e2e.server import Server
from tests.source_tree import ROOT
from tests.waiting import wait_until

LIMIT_S = 90
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0}


def batch_line(custom_id: str, body: dict, url: str = "/v1/completions") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def start(model: Path, source: Path, target: Path, *flags: str, log: Path) -> subprocess.Popen[bytes]:
    small = ("--kv-cache-memory", "32MiB", "--max-model-len", "4096", *flags)
    command = [sys.executable, "-m", "serve", "run-batch", "-i", str(source), "-o", str(target), str(model), *small]
    with log.open("wb") as stderr:
        return subprocess.Popen(
            command, cwd=ROOT, stderr=stderr, stdout=subprocess.DEVNULL, env={**os.environ, "NO_COLOR": "1"}
        )


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_line_is_answered_and_a_bad_one_has_its_error(tiny_model: Path, tiny: Server, tmp_path: Path) -> None:
    source, target, log = tmp_path / "in", tmp_path / "out", tmp_path / "log"
    good = [batch_line(f"r{i}", {"prompt": f"text {i}", "max_tokens": 6, "temperature": 0}) for i in range(20)]
    others = [
        batch_line("chat", CHAT, "/v1/chat/completions"),
        batch_line("wrong", {"prompt": "a", "temperature": 9}),
        batch_line("unknown", {"prompt": "a", "model": "nobody"}),
        batch_line("embed", {"input": "a"}, "/v1/embeddings"),
        "not json",
    ]
    source.write_text("\n".join([*good, *others]) + "\n")
    # The key is for clients; the batch's own requests carry it.
    assert start(tiny_model, source, target, "--api-key", "secret", log=log).wait(LIMIT_S) == 0, log.read_text()
    lines = {line["custom_id"]: line for line in lines_of(target)}
    assert len(lines) == len(lines_of(target)) == 25
    for i in range(20):
        expected = choice_of(complete(tiny, f"text {i}", max_tokens=6))["text"]
        line = lines[f"r{i}"]
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        assert line["response"]["body"]["choices"][0]["text"] == expected
    assert lines["chat"]["response"]["body"]["object"] == "chat.completion"
    statuses = {name: lines[name]["response"]["status_code"] for name in ("wrong", "unknown", "embed")}
    assert statuses == {"wrong": 400, "unknown": 404, "embed": 404}
    assert lines["wrong"]["error"]["message"] == "temperature must be in [0, 2], got 9.0"
    assert lines[None]["response"] is None
    assert lines[None]["error"]["message"].startswith("line 25: JSON is malformed")
    assert len({line["id"] for line in lines.values()}) == 25
    assert "batch complete: lines=25 errors=4 (4 new)" in log.read_text()


def test_a_run_that_was_killed_goes_on_without_repeating_a_line(tiny_model: Path, tmp_path: Path) -> None:
    source, target, log = tmp_path / "in", tmp_path / "out", tmp_path / "log"
    body = {"prompt": [5], "max_tokens": 400, "ignore_eos": True}
    source.write_text("\n".join(batch_line(f"r{i}", body) for i in range(24)) + "\n")
    first = start(tiny_model, source, target, "--max-num-seqs", "2", log=log)
    wait_until(lambda: len(lines_of(target)) >= 2, LIMIT_S, "some lines are written")
    children = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    first.wait(LIMIT_S)
    wait_until(lambda: not any(child.is_running() for child in children), 15, "the engine core is gone")
    with target.open("ab") as out:
        out.write(b'{"id": "half a li')
    before = [line for line in target.read_bytes().splitlines() if line.endswith(b"}")]
    assert 2 <= len(before) < 24
    second = start(tiny_model, source, target, "--max-num-seqs", "2", log=log)
    wait_until(lambda: len(target.read_bytes().splitlines()) > len(before) + 1, LIMIT_S, "more lines are written")
    second.send_signal(signal.SIGINT)
    assert second.wait(LIMIT_S) == 130, log.read_text()
    assert "run again to go on" in log.read_text()
    assert start(tiny_model, source, target, log=log).wait(LIMIT_S) == 0, log.read_text()
    lines = lines_of(target)
    assert sorted(line["custom_id"] for line in lines) == sorted(f"r{i}" for i in range(24))
    assert target.read_bytes().splitlines()[: len(before)] == before


def test_a_batch_that_is_complete_loads_no_model(tmp_path: Path) -> None:
    source, target, log = tmp_path / "in", tmp_path / "out", tmp_path / "log"
    source.write_text(batch_line("a", {"prompt": "x"}) + "\n" + batch_line("b", {}, "/nowhere") + "\n")
    answers = [
        {"id": "1", "custom_id": "a", "response": {"status_code": 200, "request_id": "r", "body": {}}},
        {"id": "2", "custom_id": "b", "error": {"code": "invalid_line", "message": "no such path"}},
    ]
    target.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    before = target.read_bytes()
    assert start(tmp_path / "no-model", source, target, log=log).wait(LIMIT_S) == 0, log.read_text()
    assert "batch complete: lines=2 errors=1 (0 new); nothing was left to do" in log.read_text()
    assert target.read_bytes() == before


def test_what_cannot_work_ends_at_once_with_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    missing = start(tmp_path, tmp_path / "no", tmp_path / "out", log=log)
    assert missing.wait(LIMIT_S) == 2
    assert log.read_text().splitlines() == [f"serve: error: --input-file {tmp_path / 'no'} is not a file"]
