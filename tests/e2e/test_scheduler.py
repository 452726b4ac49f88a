"""The order and the limits of steps (S1 to S13)."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import httpx
import pytest

from tests.e2e.client import (
    Json,
    chat,
    choice_of,
    complete,
    messages,
    open_stream,
    post,
    read_stream,
    stream_complete,
    text_of,
    together,
    tokenize,
    usage_of,
)
from tests.e2e.server import Server
from tests.waiting import wait_until

COMPLETIONS = "/v1/completions"
# Seconds of work: longer than a few round trips on a machine that is busy with other tests.
BUSY_TOKENS = 400

LONG_TEXT = " ".join(f"Item {i} is a {w}." for i, w in enumerate(["box", "cat", "map", "key", "sun"] * 8))


@contextmanager
def background(server: Server, **fields: object) -> Iterator[Future[Json]]:
    """Run a completion beside the block; it has been scheduled when the block begins."""
    before = server.metric("num_requests_running") + server.metric("num_requests_waiting")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(partial(complete, server, **fields))  # type: ignore[arg-type]
        count = lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting")  # noqa: E731
        wait_until(lambda: count() > before, 30, "the request has arrived")
        yield future


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """Freeze the engine during the block, so that what arrives meanwhile arrives together."""
    assert server.client.post("/pause", params={"mode": "keep"}).status_code == 200
    try:
        yield
    finally:
        assert server.client.post("/resume").status_code == 200


class Finishes:
    """Requests in threads, started one after the other, and the order in which they ended."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.order: list[str] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, text: str = "", **fields: object) -> None:
        """Send a request and return when the engine core has it in its queue."""
        before = self.server.metric("num_requests_running") + self.server.metric("num_requests_waiting")

        def run() -> None:
            complete(self.server, f"{uuid.uuid4().hex} {name} {text}", ignore_eos=True, **fields)
            with self._lock:
                self.order.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)
        total = lambda: self.server.metric("num_requests_running") + self.server.metric("num_requests_waiting")  # noqa: E731
        wait_until(lambda: total() > before, 30, f"{name} is in the engine core")

    def join(self) -> list[str]:
        """Wait for all and give their names in the order of ending."""
        for thread in self._threads:
            thread.join(60)
        return self.order


def test_s1_a_short_request_is_answered_before_a_long_prompt_ends(server: Server) -> None:
    """With default flags: this prompt takes several steps, and each leaves room for others."""
    finishes = Finishes(server)
    finishes.start("long", text=LONG_TEXT * 5, max_tokens=1)
    finishes.start("short", max_tokens=1)
    assert finishes.join()[0] == "short"


def test_s2_small_steps_do_not_change_the_text(server: Server, tight: Server) -> None:
    assert 256 < len(tokenize(server, LONG_TEXT)) < 450
    whole = complete(server, LONG_TEXT, max_tokens=24)
    chunked = complete(tight, LONG_TEXT, max_tokens=24)
    assert text_of(chunked) == text_of(whole)
    assert usage_of(chunked)["completion_tokens"] == usage_of(whole)["completion_tokens"]


def test_s3_never_more_than_the_limit_run_and_all_finish(tight: Server) -> None:
    """Four may run; ten are sent."""
    highest = 0.0
    calls = [partial(complete, tight, f"Number {i}:", max_tokens=24, ignore_eos=True) for i in range(10)]
    with ThreadPoolExecutor(10) as pool:
        futures = [pool.submit(c) for c in calls]
        while not all(f.done() for f in futures):
            highest = max(highest, tight.metric("num_requests_running"))
        answers = [f.result() for f in futures]
    assert highest == 4
    assert [usage_of(a)["completion_tokens"] for a in answers] == [24] * 10


def test_s4_preempted_requests_give_the_same_texts(server: Server, tight: Server) -> None:
    """Four requests of over 160 tokens need 44 blocks of the 40; their prompts of 100 to 120 leave room for all."""
    prompts = [f"Chapter {i}. " + "It was a dark night and the wind was cold. " * 9 for i in range(6)]
    assert all(100 < len(tokenize(server, p)) < 120 for p in prompts)
    before = tight.metric("num_preemptions_total")
    ask = [partial(complete, tight, p, max_tokens=64, ignore_eos=True) for p in prompts]
    pressed = together(*ask)
    assert tight.metric("num_preemptions_total") > before
    free = together(*[partial(complete, server, p, max_tokens=64, ignore_eos=True) for p in prompts])
    assert [text_of(a) for a in pressed] == [text_of(a) for a in free]


def test_s5_lower_priority_value_leaves_the_queue_first_and_ties_go_by_arrival(
    one_at_a_time_server: Server,
) -> None:
    one_at_a_time_server.wait_idle()
    finishes = Finishes(one_at_a_time_server)
    finishes.start("running", max_tokens=BUSY_TOKENS)
    finishes.start("five", max_tokens=4, priority=5)
    finishes.start("one, first", max_tokens=4, priority=1)
    finishes.start("one, second", max_tokens=4, priority=1)
    assert finishes.join() == ["running", "one, first", "one, second", "five"]


def test_s6_first_come_first_served_ignores_priorities(tight: Server) -> None:
    """Three slots stay busy; the fourth serves the waiting ones in order of arrival."""
    finishes = Finishes(tight)
    with paused(tight):
        for i in range(3):
            finishes.start(f"long {i}", max_tokens=150)
        finishes.start("running", max_tokens=40)
        finishes.start("five", max_tokens=8, priority=5)
        finishes.start("one", max_tokens=8, priority=1)
    assert finishes.join()[:3] == ["running", "five", "one"]


def test_s7_an_end_token_at_the_limit_is_a_stop(server: Server) -> None:
    natural = chat(server, "What is 2+2? Answer with the number only.", max_tokens=200)
    assert choice_of(natural)["finish_reason"] == "stop"
    count = usage_of(natural)["completion_tokens"]
    exact = chat(server, "What is 2+2? Answer with the number only.", max_tokens=count)
    assert choice_of(exact)["finish_reason"] == "stop"
    assert text_of(exact) == text_of(natural)
    short = chat(server, "What is 2+2? Answer with the number only.", max_tokens=count - 1)
    assert choice_of(short)["finish_reason"] == "length"


def test_s8_a_client_that_hangs_up_frees_its_slot_at_once(server: Server) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}
    with open_stream(server, COMPLETIONS, body) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert server.metric("num_requests_running") == 1
    server.wait_idle()
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(COMPLETIONS, json=body, timeout=0.5)
    server.wait_idle()
    assert server.metric("kv_cache_usage_perc") == 0


def test_s8_hang_ups_are_counted_as_aborts(server: Server) -> None:
    def aborts() -> float:
        found = server.samples("serve:request_success_total")
        return sum(v for labels, v in found if labels["finished_reason"] == "abort")

    before = aborts()
    with open_stream(server, COMPLETIONS, {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: aborts() > before, 30, "the abort is counted")
    assert aborts() == before + 1


def test_s9_a_request_that_leaves_the_queue_never_runs(one_at_a_time_server: Server) -> None:
    server = one_at_a_time_server
    server.wait_idle()
    before = server.metric("prompt_tokens_total")
    with background(server, prompt="One, two,", max_tokens=BUSY_TOKENS, ignore_eos=True) as running:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(COMPLETIONS, json={"prompt": "never", "max_tokens": 500}, timeout=0.4)
        wait_until(lambda: server.metric("num_requests_waiting") == 0, 30, "the queue is empty")
        answer = running.result(60)
    server.wait_idle()
    assert server.metric("prompt_tokens_total") == before + usage_of(answer)["prompt_tokens"]


def test_s10_a_prompt_that_does_not_fit_now_waits_without_thrashing(tight: Server) -> None:
    """20 of 40 blocks are held by a running request; a prompt of 26 blocks waits for it."""
    before = tight.metric("num_preemptions_total")
    with background(tight, prompt=[50] * 320, max_tokens=150, ignore_eos=True) as first:
        wait_until(lambda: tight.metric("kv_cache_usage_perc") >= 0.5, 60, "the first holds its 20 blocks")
        with background(tight, prompt=[60] * 416, max_tokens=4, ignore_eos=True) as second:
            assert not first.done()
            saw_waiting = tight.metric("num_requests_waiting")
            first.result(60)
            answer = second.result(60)
    assert saw_waiting == 1
    assert usage_of(answer)["completion_tokens"] == 4
    assert tight.metric("num_preemptions_total") == before


def test_s11_async_scheduling_changes_nothing(server: Server, plain: Server) -> None:
    """Also: with and without prefix cache, which differ between the two servers too."""
    asks = [
        {"prompt": "The three primary colours are", "max_tokens": 20},
        {"prompt": "1, 2, 3, 4,", "max_tokens": 30, "stop": "9"},
        {"prompt": "Once upon a time", "max_tokens": 1},
        {"prompt": "Dear Sir or Madam,", "max_tokens": 33, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"prompt": "Seeded:", "max_tokens": 25, "temperature": 0.8, "seed": 11, "top_p": 0.9},
        {"prompt": "Seeded:", "max_tokens": 25, "temperature": 1.2, "seed": 12, "top_k": 40, "min_p": 0.05},
        {"prompt": "Q: What is the capital of France?\nA:", "max_tokens": 48, "stop": ["\n"]},
        {"prompt": "Q: What is the capital of France?\nA:", "max_tokens": 12, "min_tokens": 12, "stop": ["\n"]},
    ]

    def outcome(answer: Json) -> tuple[str, object, object, int]:
        choice = choice_of(answer)
        tokens = usage_of(answer)["completion_tokens"]
        return text_of(answer), choice["finish_reason"], choice["stop_reason"], tokens

    on = [outcome(a) for a in together(*[partial(complete, server, **a) for a in asks])]
    off = [outcome(a) for a in together(*[partial(complete, plain, **a) for a in asks])]
    assert on == off


def test_s12_pause_keep_freezes_a_stream_and_resume_continues_it(tight: Server) -> None:
    fields = {"prompt": "Once upon a time there was", "max_tokens": 60, "ignore_eos": True}
    whole = text_of(complete(tight, **fields))  # type: ignore[arg-type]
    with open_stream(tight, COMPLETIONS, fields) as response:
        assert tight.client.post("/pause", params={"mode": "keep"}).status_code == 200
        assert tight.client.get("/is_paused").json() == {"is_paused": True}
        frozen = tight.metric("generation_tokens_total")
        # A health round trip outlasts a step, so a step that still ran would show.
        for _ in range(20):
            assert tight.status("/health") == 200
        assert tight.metric("generation_tokens_total") == frozen
        assert tight.client.post("/resume").status_code == 200
        stream = read_stream(response)
    assert stream.text() == whole
    assert stream.finish_reason() == "length"


def test_s13_pause_abort_ends_running_requests_and_new_ones_wait(tight: Server) -> None:
    with background(tight, prompt="Once upon", max_tokens=400, ignore_eos=True) as running:
        wait_until(lambda: tight.metric("num_requests_running") == 1, 30, "it runs")
        assert tight.client.post("/pause", params={"mode": "abort"}).status_code == 200
        aborted = running.result(10)
        assert choice_of(aborted)["finish_reason"] == "abort"
    with background(tight, prompt="Once upon", max_tokens=4, ignore_eos=True) as waiting:
        assert tight.metric("num_requests_running") == 0
        assert not waiting.done()
        assert tight.client.post("/resume").status_code == 200
        assert usage_of(waiting.result(20))["completion_tokens"] == 4


def test_streamed_equals_plain_under_load(server: Server) -> None:
    prompts = [f"List {i}: apples," for i in range(6)]
    plain_texts = [text_of(a) for a in together(*[partial(complete, server, p, max_tokens=20) for p in prompts])]
    with ThreadPoolExecutor(6) as pool:
        streams = list(pool.map(lambda p: stream_complete(server, p, max_tokens=20), prompts))
    assert [s.text() for s in streams] == plain_texts


def test_a_bad_request_beside_good_ones_harms_nobody(server: Server) -> None:
    def bad() -> Json:
        response = post(server, "/v1/chat/completions", {"messages": messages("x"), "temperature": -1})
        return {"status": response.status_code}

    good = partial(chat, server, "Name a bird.", max_tokens=8)
    alone = text_of(good())
    answers = together(good, bad, good, bad, good)
    assert [a.get("status") for a in answers] == [None, 400, None, 400, None]
    assert [text_of(a) for a in answers if "status" not in a] == [alone] * 3


def test_queue_wait_shows_in_the_histogram(one_at_a_time_server: Server) -> None:
    server = one_at_a_time_server
    server.wait_idle()
    before = server.metric("request_queue_time_seconds_sum")
    started = time.monotonic()
    together(*[partial(complete, server, f"Wait {i}", max_tokens=10, ignore_eos=True) for i in range(3)])
    took = time.monotonic() - started
    waited = server.metric("request_queue_time_seconds_sum") - before
    # One at a time: the second waits for the first, the third for both: at least the time of one in sum.
    assert took / 3 < waited < 2 * took
