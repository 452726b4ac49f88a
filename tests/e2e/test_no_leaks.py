"""Readers that vanish leave nothing behind (W1, W2)."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import psutil

from tests.e2e.client import complete, open_stream, text_of
from tests.e2e.server import Server

COMPLETIONS = "/v1/completions"


def test_w1_a_thousand_killed_readers_leave_no_state_and_no_blocks(tiny: Server) -> None:
    canary = text_of(complete(tiny, "canary", max_tokens=12))
    files = psutil.Process(tiny.process.pid).num_fds()

    def start_and_leave(number: int) -> str:
        body = {"prompt": f"the other {number}", "max_tokens": 500, "ignore_eos": True}
        with open_stream(tiny, COMPLETIONS, body) as response:
            return next(response.iter_lines())

    with ThreadPoolExecutor(16) as pool:
        first_lines = list(pool.map(start_and_leave, range(1000)))
    assert all(line.startswith("data: ") for line in first_lines)
    tiny.wait_idle()
    assert text_of(complete(tiny, "canary", max_tokens=12)) == canary
    # Pooled connections of this test may still be open: at most one for each of its threads and the fixture's.
    assert psutil.Process(tiny.process.pid).num_fds() <= files + 17


def send_and_vanish(server: Server, number: int) -> None:
    """Write a whole request and close the connection without reading."""
    body = json.dumps({"prompt": f"gone {number}", "max_tokens": 200, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def test_w2_requests_cancelled_before_their_first_token_reach_nobody_else(tiny: Server) -> None:
    asks = [partial(complete, tiny, f"the rest {i}", max_tokens=20, ignore_eos=True) for i in range(4)]
    alone = [text_of(ask()) for ask in asks]
    with ThreadPoolExecutor(12) as pool:
        leaving = [pool.submit(send_and_vanish, tiny, i) for i in range(100)]
        staying = [(i % 4, pool.submit(asks[i % 4])) for i in range(40)]
        leaving += [pool.submit(send_and_vanish, tiny, i) for i in range(100)]
        answers = [(i, text_of(future.result())) for i, future in staying]
        for future in leaving:
            future.result()
    assert all(text == alone[i] for i, text in answers)
    # Connections are accepted in order: once a new one is answered, none of the vanished requests is still to come.
    assert httpx.get(f"http://127.0.0.1:{tiny.port}/health").status_code == 200
    tiny.wait_idle()
