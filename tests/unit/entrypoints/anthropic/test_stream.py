"""Events and blocks of the Messages API: order, indexes and shapes, by hand from the API's reference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from serve.entrypoints.anthropic.reply import AnswerBlocks, parse_arguments, stop_fields
from serve.entrypoints.anthropic.stream import MessageStreamWriter
from serve.entrypoints.openai.turn import TurnDelta
from serve.errors import RequestFailed
from serve.renderers.output_events import CallDelta, CallStart, ContentDelta, Event, ReasoningDelta
from serve.renderers.renderer import RenderedPrompt

TEXT, THOUGHT = ContentDelta, ReasoningDelta
SIGNATURE = hashlib.sha256(b"hm, so").hexdigest()
CALL: list[Event] = [CallStart(0, "call_1", "get_time"), CallDelta(0, '{"zone":'), CallDelta(0, '"UTC"}')]


@dataclass
class FakeGeneration:
    response_id: str = "msg_1"
    model: str = "m"


@dataclass
class FakeTurn:
    prompt: RenderedPrompt = field(default_factory=lambda: RenderedPrompt([1, 2, 3], "abc"))
    num_cached_tokens: int = 2
    num_generated: list[int] = field(default_factory=lambda: [0])
    num_reasoning: list[int] = field(default_factory=lambda: [0])


def stream(
    *pieces: Sequence[Event], finish: str = "stop", stop: int | str | None = None, **options: bool
) -> list[dict]:
    """Give the events of a turn that hands over these pieces, one token each."""
    turn = FakeTurn()
    writer = MessageStreamWriter(FakeGeneration(), turn, **{"hides_thoughts": False, **options})  # type: ignore[arg-type]
    out = writer.opening()
    for i, events in enumerate(pieces):
        turn.num_generated[0] += 1
        is_last = i == len(pieces) - 1
        out += writer.events(TurnDelta(0, list(events), [i], None, finish if is_last else None, stop))
    return read_events(out + writer.closing())


def read_events(body: bytes) -> list[dict]:
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def inside(events: list[dict]) -> list[dict]:
    """Give the events of the blocks."""
    return [event for event in events if event["type"].startswith("content_block")]


def test_stream_of_text_has_one_block_between_start_and_stop() -> None:
    counts = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "input_tokens": 3}
    details = {"output_tokens_details": {"thinking_tokens": 0}}
    assert stream([TEXT("a")], [TEXT("b")]) == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**counts, **details, "output_tokens": 0},
            },
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {**counts, **details, "output_tokens": 2},
        },
        {"type": "message_stop"},
    ]


def test_thoughts_text_and_calls_are_blocks_of_their_own_one_after_the_other() -> None:
    events = stream([THOUGHT("hm,")], [THOUGHT(" so"), TEXT("Let me look.")], CALL, finish="tool_calls")
    assert inside(events) == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm,"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": " so"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": SIGNATURE}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Let me look."}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "call_1", "name": "get_time", "input": {}},
        },
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"zone":'}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '"UTC"}'}},
        {"type": "content_block_stop", "index": 2},
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_each_call_has_its_own_block() -> None:
    second: list[Event] = [CallStart(1, "call_2", "get_date"), CallDelta(1, "{}")]
    starts = [event for event in stream(CALL, second) if event["type"] == "content_block_start"]
    assert [(start["index"], start["content_block"]["id"]) for start in starts] == [(0, "call_1"), (1, "call_2")]


def test_hidden_thoughts_leave_a_block_with_only_its_signature() -> None:
    events = inside(stream([THOUGHT("hm,")], [THOUGHT(" so")], [TEXT("a")], hides_thoughts=True))
    assert [event["type"] for event in events[:3]] == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ]
    assert events[1]["delta"] == {"type": "signature_delta", "signature": SIGNATURE}


def test_answer_of_nothing_is_one_empty_text() -> None:
    assert [event["type"] for event in inside(stream([]))] == ["content_block_start", "content_block_stop"]
    assert AnswerBlocks().content(hides_thoughts=False) == [{"type": "text", "text": ""}]


def test_plain_content_holds_the_same_blocks() -> None:
    answer = AnswerBlocks()
    for events in ([THOUGHT("hm,")], [THOUGHT(" so"), TEXT("Let")], [TEXT(" me look.")], CALL):
        answer.add(events)
    assert answer.content(hides_thoughts=False) == [
        {"type": "thinking", "thinking": "hm, so", "signature": SIGNATURE},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "call_1", "name": "get_time", "input": {"zone": "UTC"}},
    ]
    assert answer.content(hides_thoughts=True)[0] == {"type": "thinking", "thinking": "", "signature": SIGNATURE}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("{}", {}),
        ('{"a": 1, "b": [2]}', {"a": 1, "b": [2]}),
        ('{"a": 1, "b": "unfini', {"a": 1}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1, 2]}}),
        ('{"a": 1, "b"', {"a": 1}),
    ],
)
def test_input_of_a_call_is_an_object_also_when_it_was_cut(arguments: str, expected: dict) -> None:
    assert parse_arguments(arguments) == expected


@pytest.mark.parametrize(
    ("finish", "stop_reason", "has_calls", "expected"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", 7, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("length", None, False, ("max_tokens", None)),
        ("length", None, True, ("max_tokens", None)),
        ("tool_calls", None, True, ("tool_use", None)),
        ("stop", None, True, ("tool_use", None)),
        ("repetition", None, False, ("end_turn", None)),
    ],
)
def test_stop_reason_says_why_the_answer_ended(
    finish: str, stop_reason: int | str | None, has_calls: bool, expected: tuple[str, str | None]
) -> None:
    fields = stop_fields(TurnDelta(0, [], [], None, finish, stop_reason), has_calls=has_calls)
    assert (fields["stop_reason"], fields["stop_sequence"]) == expected


def test_aborted_answer_is_an_error() -> None:
    with pytest.raises(RequestFailed):
        stop_fields(TurnDelta(0, [], [], None, "abort"), has_calls=False)
