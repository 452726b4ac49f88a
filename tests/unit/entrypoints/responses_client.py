"""What the tests of the Responses API share: events by name, checked against the official client's own types."""

from __future__ import annotations

import json

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

_EVENT = TypeAdapter(ResponseStreamEvent)


def read_events(body: bytes) -> list[dict]:
    """Give the events of a stream; each is named, numbered, and of a type that the client knows."""
    blocks = body.decode().split("\n\n")
    assert blocks[-1] == ""
    events = []
    for block in blocks[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        assert _EVENT.validate_python(event).type == event["type"]
        events.append(event)
    return events


def names(events: list[dict]) -> list[str]:
    """Give the types of events without the common prefix."""
    return [event["type"].removeprefix("response.") for event in events]


def check_response(body: dict) -> dict:
    """Check a Response against the client's type and give it."""
    assert Response.model_validate(body).id == body["id"]
    return body
