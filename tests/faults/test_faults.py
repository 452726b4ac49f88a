"""Things that break: each ends in a stated status within a stated time, with nothing left behind."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import zmq

from tests.e2e.client import Stream, complete, expect_refusal, open_stream, post, read_stream, text_of
from tests.e2e.server import Server, running
from tests.waiting import wait_until

COMPLETIONS = "/v1/completions"
GONE_LIMIT_S = 15.0
# A dead engine core is noticed by itself, long before its missing heartbeats are.
SILENCE_LIMIT_S = 8.0
ENDLESS = {"prompt": "the other", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def start_tiny(tiny_model: Path, *flags: str, env: dict[str, str] | None = None) -> Server:
    return Server("--kv-cache-memory", "64MiB", *flags, model=str(tiny_model), env=env)


def test_killed_engine_core_fails_plain_requests_with_its_cause(tiny_model: Path) -> None:
    with start_tiny(tiny_model) as server, ThreadPoolExecutor(4) as pool:
        server.wait_ready()
        waiting = [pool.submit(post, server, COMPLETIONS, ENDLESS) for _ in range(4)]
        wait_until(lambda: server.metric("num_requests_running") == 4, 10, "four run")
        engine = server.engine_core()
        killed = time.monotonic()
        engine.kill()
        for future in waiting:
            assert "engine_dead" in str(expect_refusal(future.result(SILENCE_LIMIT_S), 500))
        assert time.monotonic() - killed < SILENCE_LIMIT_S
        assert server.wait_exit(GONE_LIMIT_S) == 5
        assert "Traceback" not in server.log()


def test_stopped_engine_core_turns_health_503_and_back(tiny_model: Path) -> None:
    with start_tiny(tiny_model) as server:
        server.wait_ready()
        engine = server.engine_core()
        engine.suspend()
        wait_until(lambda: server.status("/health") == 503, 15, "/health sees that the engine core hangs")
        assert server.status("/live") == 200
        engine.resume()
        wait_until(lambda: server.status("/health") == 200, 10, "/health sees that it goes on")
        assert text_of(complete(server, "x", max_tokens=4, ignore_eos=True))


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 1.0, 2.0])
def test_sigterm_while_starting_ends_with_0_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, delay_s: float
) -> None:
    with start_tiny(tiny_model, env={"SERVE_IPC_DIR": str(tmp_path)}) as server:
        begin = time.monotonic()
        wait_until(lambda: server.tree() and time.monotonic() - begin >= delay_s, 10, "the moment to stop")
        tree = server.tree()
        server.terminate()
        assert server.wait_exit(GONE_LIMIT_S) in ((0,) if delay_s else (0, -signal.SIGTERM))
        wait_until(lambda: not alive(tree), GONE_LIMIT_S, "all processes are gone")
        assert list(tmp_path.iterdir()) == []


def test_killed_launcher_while_loading_leaves_no_process(tiny_model: Path) -> None:
    with start_tiny(tiny_model) as server:
        wait_until(lambda: len(server.tree()) == 2, 10, "the engine core has been spawned")
        tree = server.tree()
        server.process.kill()
        wait_until(lambda: not alive(tree), GONE_LIMIT_S, "all processes are gone")
        assert not alive(tree)


def test_socket_folder_is_private_and_a_dead_servers_folder_is_removed(tiny_model: Path, tmp_path: Path) -> None:
    env = {"SERVE_IPC_DIR": str(tmp_path)}
    with start_tiny(tiny_model, env=env) as first:
        first.wait_ready()
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        tree = first.tree()
        first.process.kill()
        wait_until(lambda: not alive(tree), GONE_LIMIT_S, "all processes are gone")
    with start_tiny(tiny_model, env=env) as second:
        second.wait_ready()
        (other,) = tmp_path.iterdir()
        assert other != folder
        second.terminate()
        assert second.wait_exit() == 0
    assert list(tmp_path.iterdir()) == []


def test_junk_frames_on_the_internal_sockets_change_nothing(tiny_model: Path, tmp_path: Path) -> None:
    source = random.Random(7)
    with start_tiny(tiny_model, env={"SERVE_IPC_DIR": str(tmp_path)}) as server:
        server.wait_ready()
        before = text_of(complete(server, "the other", max_tokens=8))
        context = zmq.Context()
        for path in sorted(p for p in tmp_path.rglob("*") if p.is_socket()):
            for kind in (zmq.PUSH, zmq.DEALER):
                junk = context.socket(kind)
                junk.setsockopt(zmq.LINGER, 200)
                junk.setsockopt(zmq.SNDTIMEO, 200)
                junk.connect(f"ipc://{path}")
                for _ in range(50):
                    frames = [source.randbytes(source.randrange(200)) for _ in range(source.randrange(1, 4))]
                    try:
                        junk.send_multipart(frames)
                    except zmq.Again:
                        break
                junk.close()
        context.term()
        assert text_of(complete(server, "the other", max_tokens=8)) == before
        assert server.status("/health") == 200
        assert len(server.tree()) == 2


def test_full_queue_answers_429_with_retry_after(tiny_model: Path) -> None:
    """One runs, four may wait; of forty at once each is answered or refused, none is lost."""
    with start_tiny(tiny_model, "--max-num-seqs", "1", "--max-waiting", "4") as server, ThreadPoolExecutor(40) as pool:
        server.wait_ready()
        body = {"prompt": "the other", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        answers = [f.result() for f in [pool.submit(post, server, COMPLETIONS, body) for _ in range(40)]]
        refused = [a for a in answers if a.status_code == 429]
        assert {a.status_code for a in answers} == {200, 429}
        assert len(answers) - len(refused) >= 5
        for answer in refused:
            error = expect_refusal(answer, 429)
            assert (error["type"], error["code"]) == ("RateLimitError", "overloaded")
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        server.wait_idle()
        assert text_of(complete(server, "the other", max_tokens=4, ignore_eos=True))


def test_what_does_not_finish_in_the_shutdown_timeout_gets_an_error(tiny_model: Path) -> None:
    with start_tiny(tiny_model, "--shutdown-timeout", "1") as server, ThreadPoolExecutor(2) as pool:
        server.wait_ready()
        plain = pool.submit(post, server, COMPLETIONS, {**ENDLESS, "n": 4})
        streams: list[Stream] = []
        begun = threading.Event()

        def stream() -> None:
            with open_stream(server, COMPLETIONS, {**ENDLESS, "logprobs": 20}) as response:
                begun.set()
                streams.append(read_stream(response))

        reader = pool.submit(stream)
        assert begun.wait(10)
        wait_until(lambda: server.metric("num_requests_running") >= 2, 5, "both run")
        server.terminate()
        assert server.wait_exit(10) == 0
        reader.result(5)
        expect_refusal(plain.result(5), 503)
        assert streams[0].error is not None
        assert not streams[0].done


def test_half_a_request_and_garbage_bytes_are_survived(tiny: Server) -> None:
    import socket

    for content in (b"GET /health HTT", b"\x00\xff" * 500, b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", tiny.port)) as raw:
            raw.sendall(content)
    with socket.create_connection(("127.0.0.1", tiny.port)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(3000)) + b"\r\n")
        raw.settimeout(10)
        head = raw.recv(100)
        assert b" 431 " in head or b" 400 " in head or head == b""
    assert tiny.status("/health") == 200


def broken_checkpoint(tiny_model: Path, folder: Path, damage: str) -> Path:
    """Copy the tiny checkpoint and break one thing."""
    for source in tiny_model.iterdir():
        (folder / source.name).write_bytes(source.read_bytes())
    weights = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    match damage:
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        case "wild header length":
            weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
        case "unsupported architecture":
            (folder / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
        case "config is no JSON":
            (folder / "config.json").write_text("{")
        case "misshaped weights":
            (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
            (folder / "tokenizer_config.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        ("truncated weights", "model.safetensors"),
        ("wild header length", "model.safetensors"),
        ("unsupported architecture", "LlamaForCausalLM"),
        ("config is no JSON", "config.json"),
        ("misshaped weights", "mlp"),
        ("no tokenizer", "tokenizer"),
    ],
)
def test_broken_checkpoint_ends_with_3_and_one_clear_line(
    tiny_model: Path, tmp_path: Path, damage: str, word: str
) -> None:
    with Server(model=str(broken_checkpoint(tiny_model, tmp_path, damage))) as server:
        assert server.wait_exit(20) == 3
        log = server.log()
    assert "Traceback" not in log
    last = log.splitlines()[-1]
    assert word in last


def test_http_pipelined_after_an_error_still_works(tiny: Server) -> None:
    with httpx.Client(base_url=tiny.base_url) as client:
        for _ in range(5):
            assert (
                client.post(COMPLETIONS, content=b"{", headers={"content-type": "application/json"}).status_code == 400
            )
            assert client.get("/health").status_code == 200


def test_failing_start_names_memory(tiny_model: Path) -> None:
    with running("--kv-cache-memory", "64MiB", model=str(tiny_model)) as server:
        assert server.status("/health") == 200
    with Server("--kv-cache-memory", "4KiB", model=str(tiny_model)) as server:
        assert server.wait_exit(20) == 4
        assert "GiB" in server.log() or "KiB" in server.log()


def test_a_start_that_fails_in_the_front_end_does_not_wait_for_the_engine_core(tiny_model: Path) -> None:
    with start_tiny(tiny_model, "--tokenizer", "/no/such/folder") as server:
        assert server.wait_exit() == 3
        assert "--tokenizer /no/such/folder is not a folder" in server.log()
        assert "kv cache ready" not in server.log()
        assert "Traceback" not in server.log()
