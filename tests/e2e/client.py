"""Requests as a plain HTTP client sends them, and a strict reader of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from tests.e2e.server import Server

Json = dict[str, object]


@dataclass(slots=True)
class Stream:
    """All events of one stream. done: the last event was [DONE]."""

    chunks: list[Json] = field(default_factory=list)
    done: bool = False
    error: Json | None = None

    def text(self, index: int = 0) -> str:
        """Join the text deltas of one choice, of chat and completion chunks alike."""
        parts = []
        for choice in self.choices(index):
            delta = choice.get("delta")
            parts.append((delta.get("content") if isinstance(delta, dict) else choice.get("text")) or "")
        return "".join(parts)

    def choices(self, index: int = 0) -> list[Json]:
        """Give the entries of one choice in order."""
        return [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]  # type: ignore[attr-defined]

    def finish_reason(self, index: int = 0) -> object:
        """Give the one finish reason of a choice; fail when there is none or more than one."""
        reasons = [c["finish_reason"] for c in self.choices(index) if c["finish_reason"] is not None]
        assert len(reasons) == 1, reasons
        return reasons[0]

    def token_ids(self, index: int = 0) -> list[int]:
        """Join the token ids of one choice (needs return_token_ids)."""
        return [t for c in self.choices(index) for t in c.get("token_ids") or []]  # type: ignore[attr-defined]


def events(lines: Iterator[str]) -> Iterator[str]:
    """Give the data of each event: one data line, then a blank line; comments are allowed between events."""
    data: str | None = None
    for line in lines:
        if line == "":
            if data is not None:
                yield data
            data = None
        elif not line.startswith(":"):
            assert data is None, f"two lines in one event: {line!r}"
            assert line.startswith("data: "), f"not an event: {line!r}"
            data = line.removeprefix("data: ")
    assert data is None, "the stream ended inside an event"


def read_stream(response: httpx.Response) -> Stream:
    """Read a whole stream and check its form: JSON chunks, then [DONE], or one error event and the end."""
    assert response.status_code == 200, response.read()
    assert response.headers["content-type"].startswith("text/event-stream")
    stream = Stream()
    for data in events(response.iter_lines()):
        assert not stream.done, f"an event after [DONE]: {data}"
        assert stream.error is None, f"an event after the error: {data}"
        if data == "[DONE]":
            stream.done = True
            continue
        body = json.loads(data)
        if "error" in body:
            stream.error = body["error"]
        else:
            stream.chunks.append(body)
    return stream


def messages(text: str, system: str | None = None) -> list[Json]:
    """Give a conversation of one user message."""
    head: list[Json] = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": text}]


def post(server: Server, path: str, body: object, **headers: str) -> httpx.Response:
    """Send a JSON body."""
    return server.client.post(path, json=body, headers=headers)


def complete(server: Server, prompt: object, **fields: object) -> Json:
    """Give the answer of /v1/completions, greedy unless said otherwise."""
    response = post(server, "/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def text_of(answer: Json, index: int = 0) -> str:
    """Give the text of a choice of either API."""
    choice = choice_of(answer, index)
    message = choice.get("message")
    return str(message["content"] if isinstance(message, dict) else choice["text"])


def choice_of(answer: Json, index: int = 0) -> Json:
    """Give one choice by its index."""
    choices = answer["choices"]
    assert isinstance(choices, list)
    return dict(next(c for c in choices if c["index"] == index))


def usage_of(answer: Json) -> dict[str, int]:
    """Give the usage block."""
    usage = answer["usage"]
    assert isinstance(usage, dict)
    return usage


def cached_tokens(answer: Json) -> int:
    """Give how many prompt tokens came from the prefix cache."""
    details = answer["usage"]["prompt_tokens_details"]  # type: ignore[index]
    return int(details["cached_tokens"])


def chat(server: Server, text: str, **fields: object) -> Json:
    """Give the answer of /v1/chat/completions, greedy unless said otherwise."""
    response = post(server, "/v1/chat/completions", {"messages": messages(text), "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


@contextmanager
def open_stream(server: Server, path: str, body: Json) -> Iterator[httpx.Response]:
    """Open a streamed request; leaving the block hangs up."""
    with server.client.stream("POST", path, json={"temperature": 0, **body, "stream": True}) as response:
        yield response


def stream_complete(server: Server, prompt: object, **fields: object) -> Stream:
    """Read a streamed completion to its end."""
    with open_stream(server, "/v1/completions", {"prompt": prompt, **fields}) as response:
        return read_stream(response)


def stream_chat(server: Server, text: str, **fields: object) -> Stream:
    """Read a streamed chat answer to its end."""
    with open_stream(server, "/v1/chat/completions", {"messages": messages(text), **fields}) as response:
        return read_stream(response)


def together(*calls: object, limit: int = 64) -> list[Json]:
    """Run calls at the same time and give their results in order."""
    with ThreadPoolExecutor(max_workers=min(limit, len(calls))) as pool:
        return [f.result() for f in [pool.submit(c) for c in calls]]  # type: ignore[arg-type]


def tokenize(server: Server, text: str, **fields: object) -> list[int]:
    """Give the token ids of a text."""
    response = post(server, "/tokenize", {"prompt": text, **fields})
    assert response.status_code == 200, response.text
    return list(response.json()["tokens"])


def expect_refusal(response: httpx.Response, status: int, param: str | None = None) -> Json:
    """Check that an answer is an error in the API's one shape and give the error object."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}, body
    error = dict(body["error"])
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
    return error
