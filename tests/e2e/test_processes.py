"""Processes as seen from outside: who runs, what they are called, how they start and end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.client import Stream, complete, expect_refusal, messages, open_stream, post, read_stream
from tests.e2e.server import Server, free_port, running
from tests.waiting import wait_until

SWITCH = "SERVE_TEST_FAIL_SWITCH"  # read by failing_processor.py
PREFIXED = re.compile(r"\((APIServer|EngineCore) pid=\d+\) ")
GONE_LIMIT_S = 15.0
# A dead engine core is noticed by itself, long before its missing heartbeats are.
SILENCE_LIMIT_S = 8.0


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_p1_default_launch_is_two_processes(server: Server) -> None:
    tree = server.tree()
    launcher, child = tree
    assert len(tree) == 2
    assert child.cmdline()[0] == "SERVE::EngineCore"
    assert launcher.cmdline()[1:3] == ["-m", "serve"]
    assert child.ppid() == launcher.pid


def test_p1_start_log_tells_what_a_person_wants_to_know(server: Server) -> None:
    log = server.log().lower()
    assert "smollm2-135m-instruct" in log
    assert "float32" in log
    assert "cpu" in log
    assert str(server.port) in log
    assert re.search(r"\d[\d,]{3,} tokens|tokens=\d{4,}", log)


def test_the_request_that_the_start_log_suggests_works(server: Server) -> None:
    (line,) = [line for line in server.log().splitlines() if " try: curl " in line]
    words = shlex.split(line.partition(" try: ")[2])
    body = json.loads(words[words.index("-d") + 1])
    assert body["temperature"] == 0
    response = server.client.post(words[1], json=body)
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"]
    assert response.json()["usage"]["completion_tokens"] <= body["max_tokens"]


def test_only_the_http_port_listens(server: Server) -> None:
    listening = [c for p in server.tree() for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [(c.laddr.ip, c.laddr.port) for c in listening] == [("127.0.0.1", server.port)]


def test_p5_every_line_of_a_traceback_has_the_process_prefix(
    built_in_model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    switch = tmp_path_factory.mktemp("p5") / "fail"
    flags = ("--logits-processors", "tests.e2e.failing_processor:FailingProcessor", "--max-model-len", "512")
    with running(*flags, model=built_in_model, env={SWITCH: str(switch)}) as server:
        complete(server, "before", max_tokens=2)
        switch.touch()
        response = post(server, "/v1/completions", {"prompt": "x", "max_tokens": 4})
        assert response.status_code in (500, 503)
        assert "failure" not in response.text
        assert server.wait_exit() == 5
        lines = [line for line in server.log().splitlines() if line]
        first = next(i for i, line in enumerate(lines) if "Traceback" in line)
        assert "second line of the failure" in "\n".join(lines[first:])
        assert [line for line in lines if not PREFIXED.match(line)] == []
        assert lines[first].startswith("(EngineCore pid=")


def test_p6_port_in_use_is_one_line_and_exit_code_4(built_in_model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Server("--port", str(port), model=built_in_model) as server:
            assert server.wait_exit() == 4
            lines = [line for line in server.log().splitlines() if line]
    assert len(lines) == 1, lines  # nothing of loading the model
    assert str(port) in lines[0]


def test_p7_while_loading_http_answers_503_with_retry_after(built_in_model: str) -> None:
    with Server("--max-model-len", "512", model=built_in_model) as server:
        wait_until(lambda: server.status("/live") == 200, 10, "/live answers")
        response = server.client.get("/v1/models")
        error = expect_refusal(response, 503)
        assert error["code"] == "loading"
        assert int(response.headers["retry-after"]) >= 1
        assert server.status("/health") == 503
        assert server.status("/ready") == 503
        server.wait_ready()
        assert server.status("/v1/models") == 200
        assert server.status("/ready") == 200


def test_p8_killed_engine_core_ends_the_stream_with_an_error_event(built_in_model: str) -> None:
    with running("--max-model-len", "2048", model=built_in_model) as server:
        tree = server.tree()
        body = {"messages": messages("Tell a long story."), "max_tokens": 1500, "ignore_eos": True}
        with open_stream(server, "/v1/chat/completions", body) as response:
            lines = response.iter_lines()
            next(lines)
            engine = server.engine_core()
            killed = time.monotonic()
            engine.kill()
            rest = [line for line in lines if line]
            assert time.monotonic() - killed < SILENCE_LIMIT_S
        assert '"error"' in rest[-1]
        assert "engine_dead" in rest[-1]
        assert "data: [DONE]" not in rest
        assert server.status("/health") in (503, None)
        assert server.wait_exit(GONE_LIMIT_S) == 5
        wait_until(lambda: not alive(tree), GONE_LIMIT_S, "all processes are gone")


def test_p10_killed_launcher_leaves_no_process(built_in_model: str) -> None:
    with running("--max-model-len", "512", model=built_in_model) as server:
        engine = server.engine_core()
        server.process.kill()
        wait_until(lambda: not alive([engine]), GONE_LIMIT_S, "the engine core is gone")
        assert not alive([engine])


def long_stream(server: Server, results: list[Stream], max_tokens: int) -> threading.Thread:
    """Start a stream in a thread and return once it has begun."""
    begun = threading.Event()

    def run() -> None:
        body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
        with open_stream(server, "/v1/completions", body) as response:
            begun.set()
            results.append(read_stream(response))

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(30)
    return thread


def test_p11_sigterm_refuses_new_work_and_a_second_signal_stops_at_once(built_in_model: str) -> None:
    with running("--max-model-len", "8192", model=built_in_model) as server:
        tree = server.tree()
        results: list[Stream] = []
        thread = long_stream(server, results, 8000)
        server.terminate()
        wait_until(lambda: server.status("/ready") == 503, 5, "/ready turns 503")
        error = expect_refusal(post(server, "/v1/completions", {"prompt": "x"}), 503)
        assert error["code"] == "draining"
        assert alive(tree) == tree
        assert "a second signal stops at once" in server.log()
        server.terminate()
        server.wait_exit(GONE_LIMIT_S)
        thread.join(5)
        wait_until(lambda: not alive(tree), GONE_LIMIT_S, "all processes are gone")
    assert all(not stream.done for stream in results)


def test_p12_running_generation_completes_within_the_shutdown_timeout(built_in_model: str) -> None:
    with running("--shutdown-timeout", "30", "--max-model-len", "512", model=built_in_model) as server:
        results: list[Stream] = []
        thread = long_stream(server, results, 60)
        server.terminate()
        assert server.wait_exit(30) == 0
        thread.join(5)
    assert len(results) == 1
    assert results[0].done
    assert results[0].finish_reason() == "length"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["terminal", "supervisor"])
def test_p12_a_signal_to_the_whole_group_drains_too(tiny_model: Path, number: signal.Signals) -> None:
    """Terminals and supervisors signal every process, so the engine core must finish what its parent waits for."""
    with running("--kv-cache-memory", "64MiB", model=str(tiny_model)) as server:
        results: list[Stream] = []
        thread = long_stream(server, results, 1500)
        os.killpg(server.process.pid, number)
        assert server.wait_exit(30) == 0
        thread.join(5)
        log = server.log()
    assert results[0].finish_reason() == "length"
    assert "ERROR" not in log
    assert "Traceback" not in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["terminal", "supervisor"])
def test_a_signal_to_the_whole_group_of_an_idle_server_is_a_clean_end(tiny_model: Path, number: signal.Signals) -> None:
    with running("--kv-cache-memory", "64MiB", model=str(tiny_model)) as server:
        os.killpg(server.process.pid, number)
        assert server.wait_exit(10) == 0
        assert "ERROR" not in server.log()


def test_p13_too_few_blocks_name_the_lengths_and_sizes(built_in_model: str) -> None:
    flags = ("--num-gpu-blocks-override", "4", "--max-model-len", "2048")
    with Server(*flags, model=built_in_model) as server:
        assert server.wait_exit(30) == 4
        log = server.log()
    assert "2048" in log
    assert len(re.findall(r"\d+(?:\.\d+)? GiB", log)) >= 2
    # Four blocks of 16 tokens, one of them reserved.
    assert re.search(r"\b48\b", log)
    assert "Traceback" not in log


def test_p14_auto_length_is_what_fits(one_at_a_time_server: Server) -> None:
    """The server was started with --max-model-len -1 and 65 blocks of 16 tokens, one of them reserved."""
    data = one_at_a_time_server.client.get("/v1/models").json()["data"]
    assert data[0]["max_model_len"] == 64 * 16


def test_start_refuses_a_bad_flag_in_one_line_and_exit_code_2() -> None:
    with Server("--block-size", "17", "--port", str(free_port())) as server:
        assert server.wait_exit() == 2
        lines = server.log().splitlines()
    assert len(lines) == 1
    assert "--block-size" in lines[0]


def test_start_refuses_a_missing_model_in_one_line_and_exit_code_3() -> None:
    with Server(model="./no/such/folder") as server:
        assert server.wait_exit(10) == 3
        lines = server.log().splitlines()
    assert len(lines) == 1
    assert "no/such/folder" in lines[0]
