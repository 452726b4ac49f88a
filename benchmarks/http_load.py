"""A load generator for OpenAI-compatible servers: streamed completions over plain sockets, at little cost of its own.

Each data event is one time stamp; the text is not looked at. The workloads have prompts of short English words, about
one token each:

    decode    16 words, 128 tokens   generation
    chat      96 words,  64 tokens   the everyday mix
    prefill  900 words,   8 tokens   prompts, all different
    prefix   900 words,  16 tokens   prompts that share their first 880 words
    tiny       4 words,  16 tokens   the path around the model
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import uvloop

_NOUNS = (
    "river stone garden letter window morning market bridge engine winter summer forest island teacher doctor "
    "kitchen mirror button carpet pencil bottle basket ladder hammer candle blanket pillow curtain orange lemon "
    "cherry butter cheese pepper sugar coffee dinner supper village castle harbor valley desert mountain ocean "
    "planet rocket signal number circle square corner center middle finger shoulder silver copper cotton leather"
)
WORDS = _NOUNS.split()


@dataclass(frozen=True)
class Workload:
    """Requests of one kind; per_stream of them are sent one after the other on each stream."""

    num_words: int
    num_shared: int
    num_tokens: int
    per_stream: int


WORKLOADS = {
    "decode": Workload(16, 0, 128, 2),
    "chat": Workload(96, 0, 64, 3),
    "prefill": Workload(900, 0, 8, 2),
    "prefix": Workload(900, 880, 16, 3),
    "tiny": Workload(4, 0, 16, 8),
}


@dataclass
class Answer:
    """One request's end: seconds of perf_counter at its start and at each event with text; error is empty if all well.

    num_tokens is what the server counted, or the number of events where it does not say.
    """

    start: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class _Reader(asyncio.Protocol):
    """Reads one streamed answer on a connection of its own."""

    def __init__(self, request: bytes, answer: Answer) -> None:
        self.is_over = asyncio.get_running_loop().create_future()
        self._request = request
        self._answer = answer
        self._buffer = b""
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods and not the base class.
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._head:
            self._head = data[:64]
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                if b'"choices":[{' in line or b'"choices": [{' in line:
                    self._answer.times.append(now)
                if b'"completion_tokens"' in line:
                    self._answer.num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                if line.startswith(b'data: {"error"'):
                    self._answer.error = line[6:200].decode(errors="replace")
            elif line.startswith(b"data: [DONE]"):
                self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over.done():
            self._answer.error = self._answer.error or f"cut off: {exc or self._head!r}"
            self._end()

    def _end(self) -> None:
        if not self._answer.times and not self._answer.error:
            self._answer.error = f"no text: {self._head!r}"
        self._answer.num_tokens = self._answer.num_tokens or len(self._answer.times)
        if not self.is_over.done():
            self.is_over.set_result(None)


async def complete(url: str, body: dict[str, object], *, timeout: float = 300.0) -> Answer:
    """Send one streaming request to /v1/completions, or to /v1/chat/completions when it has messages."""
    parts = urlsplit(url)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    answer = Answer(time.perf_counter())
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            transport, reader = await loop.create_connection(
                lambda: _Reader(head.encode() + payload, answer), parts.hostname, parts.port
            )
            try:
                await reader.is_over
            finally:
                transport.close()
    except (OSError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def plan(workload: Workload, model: str, num_streams: int, *, seed: int) -> list[list[dict[str, object]]]:
    """Give the bodies of each stream. The same seed gives the same requests; another seed shares no prefix."""
    rng = random.Random(seed)
    shared = [f"{seed}", *rng.choices(WORDS, k=workload.num_shared - 1)] if workload.num_shared else []

    def body() -> dict[str, object]:
        own = rng.choices(WORDS, k=workload.num_words - workload.num_shared)
        return {
            "model": model,
            "prompt": " ".join([*shared, *own]),
            "max_tokens": workload.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    return [[body() for _ in range(workload.per_stream)] for _ in range(num_streams)]


async def _run(url: str, streams: list[list[dict[str, object]]]) -> list[Answer]:
    async def one(bodies: list[dict[str, object]]) -> list[Answer]:
        return [await complete(url, body) for body in bodies]

    return [answer for answers in await asyncio.gather(*map(one, streams)) for answer in answers]


def run_round(url: str, streams: list[list[dict[str, object]]]) -> dict[str, float]:
    """Send all streams at once and give the round's figures: tokens/s, requests/s, milliseconds, failed requests."""
    start = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers = runner.run(_run(url, streams))
    seconds = time.perf_counter() - start
    good = [answer for answer in answers if not answer.error]
    firsts = sorted(answer.first for answer in good)
    gaps = sorted(gap for answer in good for gap in answer.gaps)
    return {
        "tokens_per_s": round(sum(answer.num_tokens for answer in good) / seconds, 1),
        "requests_per_s": round(len(good) / seconds, 2),
        "ttft_p50_ms": percentile_ms(firsts, 0.5),
        "ttft_p99_ms": percentile_ms(firsts, 0.99),
        "itl_p50_ms": percentile_ms(gaps, 0.5),
        "itl_p99_ms": percentile_ms(gaps, 0.99),
        "errors": len(answers) - len(good),
    }


def percentile_ms(seconds: list[float], share: float) -> float:
    """Give a quantile of sorted seconds, in milliseconds."""
    return round(1e3 * seconds[min(len(seconds) - 1, int(share * len(seconds)))], 2) if seconds else float("nan")
