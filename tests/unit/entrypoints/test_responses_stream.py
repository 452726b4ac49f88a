"""Deltas of a turn as events and items: order, numbers and places, checked against the official client's types."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from serve.engine.outputs import Logprob
from serve.entrypoints.http_errors import ErrorReply
from serve.entrypoints.openai.responses_output import ResponseObject, usage_counts
from serve.entrypoints.openai.responses_stream import ResponseWriter
from serve.entrypoints.openai.turn import TurnDelta
from serve.renderers.output_events import CallDelta, CallStart, ContentDelta, Event, ReasoningDelta
from tests.unit.entrypoints.responses_client import check_response, names, read_events

USAGE = usage_counts(3, 2, cached=1, written=0, reasoning=1)
ECHO = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
CLOSED = ["content_part.done", "output_item.done"]
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def new_writer(**options: object) -> ResponseWriter:
    writer = ResponseWriter(ResponseObject("resp_1", "m", 1, ECHO), **options)  # type: ignore[arg-type]
    writer.open()
    return writer


def written(*pieces: list[Event], finish: str = "stop") -> tuple[list[dict], dict]:
    """Feed the events of each delta, end the answer, and give all events and the last response."""
    writer = new_writer()
    for events in pieces:
        writer.feed(TurnDelta(0, events, [1]))
    writer.feed(TurnDelta(0, [], [], finish_reason=finish))
    writer.close(USAGE)
    events = read_events(b"".join(writer.take()))
    return events, check_response(events[-1]["response"])


def call(index: int, *arguments: str) -> list[Event]:
    return [CallStart(index, f"call_{index}", "get_time"), *(CallDelta(index, piece) for piece in arguments)]


def test_text_has_the_events_of_one_message_in_order() -> None:
    events, response = written([ContentDelta("Hi")], [ContentDelta(" you")])
    assert names(events) == ["created", "in_progress", *TEXT[:3], *TEXT[2:], *CLOSED, "completed"]
    assert [event["delta"] for event in events if "delta" in event] == ["Hi", " you"]
    assert {event["item_id"] for event in events if "item_id" in event} == {response["output"][0]["id"]}
    assert response["status"] == "completed"
    assert response["usage"] == USAGE
    (item,) = response["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hi you", "annotations": [], "logprobs": []}]
    assert item == next(event["item"] for event in events if event["type"] == "response.output_item.done")


def test_thoughts_text_and_calls_are_items_with_their_own_places() -> None:
    events, response = written(
        [ReasoningDelta("Hm")],
        [ReasoningDelta("."), ContentDelta("\n\n"), ContentDelta("Wait.")],
        call(0, '{"zone"', ': "UTC"}'),
        call(1, "{}"),
        finish="tool_calls",
    )
    thoughts = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"]
    assert names(events) == [
        "created",
        "in_progress",
        *(*thoughts, "reasoning_text.done", *CLOSED),
        *(*TEXT, *CLOSED),
        *(CALL[0], CALL[1], *CALL[1:]),
        *CALL,
        "completed",
    ]
    output = response["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert output[1]["content"][0]["text"] == "\n\nWait."
    assert [(item["call_id"], item["arguments"]) for item in output[2:]] == [
        ("call_0", '{"zone": "UTC"}'),
        ("call_1", "{}"),
    ]
    assert all(item["status"] == "completed" for item in output)
    for event in events[2:-1]:
        item_id = event.get("item_id") or event["item"]["id"]
        assert output[event["output_index"]]["id"] == item_id
        assert event.get("content_index", 0) == 0


def test_the_official_client_builds_the_same_response_from_the_events() -> None:
    writer = new_writer()
    pieces = ([ReasoningDelta("Hm.")], [ContentDelta("Wait.")], call(0, '{"zone"', ': "UTC"}'), call(1, "{}"))
    for events in pieces:
        writer.feed(TurnDelta(0, events, [1]))
    writer.feed(TurnDelta(0, [], [], finish_reason="tool_calls"))
    writer.close(USAGE)
    body = b"".join(writer.take())
    headers = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body, headers=headers))
    with httpx.Client(transport=transport) as http:
        client = openai.OpenAI(base_url="http://test/v1", api_key="unused", http_client=http)
        with client.responses.stream(model="m", input="?") as stream:
            final = stream.get_final_response()
    assert final.output_text == "Wait."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[2].arguments == '{"zone": "UTC"}'  # type: ignore[union-attr]


def test_an_item_begins_empty() -> None:
    events, _ = written([ReasoningDelta("a")], [ContentDelta("b")], call(0, "{}"))
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert [item.get("content") for item in added] == [[], [], None]
    assert added[2]["arguments"] == ""
    parts = [event["part"]["text"] for event in events if event["type"] == "response.content_part.added"]
    assert parts == ["", ""]


def test_a_cut_answer_is_incomplete_and_so_is_its_last_item() -> None:
    events, response = written([ReasoningDelta("a")], call(0, '{"zo'), finish="length")
    assert names(events)[-1] == "incomplete"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["output"][1]["arguments"] == '{"zo'
    assert response["completed_at"] is None


def test_blanks_between_thoughts_and_a_call_are_no_message() -> None:
    _, response = written([ReasoningDelta("a"), ContentDelta("\n")], [ContentDelta("\n")], call(0, "{}"))
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
    _, response = written([ReasoningDelta("a"), ContentDelta("\n")])
    assert [item["type"] for item in response["output"]] == ["reasoning"]


@pytest.mark.parametrize("pieces", [[], [[ContentDelta(" \n")]]])
def test_an_answer_of_nothing_or_blanks_is_one_message(pieces: list[list[Event]]) -> None:
    events, response = written(*pieces)
    assert names(events)[2:4] == ["output_item.added", "content_part.added"]
    (item,) = response["output"]
    assert item["content"][0]["text"] == "".join(event.text for piece in pieces for event in piece)  # type: ignore[union-attr]


def test_a_failure_closes_the_item_and_ends_with_error_and_failed() -> None:
    writer = new_writer()
    writer.feed(TurnDelta(0, [ContentDelta("Hi")], [1]))
    writer.fail(ErrorReply(500, "it broke"))
    events = read_events(b"".join(writer.take()))
    assert names(events)[-5:] == ["output_text.done", *CLOSED, "error", "failed"]
    assert events[-2] | {"sequence_number": 0} == {
        "type": "error",
        "sequence_number": 0,
        "code": None,
        "message": "it broke",
        "param": None,
    }
    response = check_response(events[-1]["response"])
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "it broke"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "Hi"


def test_a_cancelled_answer_keeps_what_was_written() -> None:
    writer = new_writer()
    writer.feed(TurnDelta(0, [ContentDelta("Hi")], [1]))
    writer.cancel()
    last = read_events(b"".join(writer.take()))[-1]["response"]
    assert check_response(last)["status"] == "cancelled"
    assert last["output"][0]["status"] == "incomplete"
    empty = new_writer()
    empty.cancel()
    assert read_events(b"".join(empty.take()))[-1]["response"]["output"] == []


def test_a_queued_response_says_so_until_it_starts() -> None:
    writer = ResponseWriter(ResponseObject("resp_1", "m", 1, ECHO, status="queued"))
    writer.open()
    writer.start()
    writer.start()
    events = read_events(b"".join(writer.take()))
    assert names(events) == ["created", "queued", "in_progress"]
    assert [event["response"]["status"] for event in events] == ["queued", "queued", "in_progress"]


def tokens(*pieces: bytes) -> tuple[list[int], list[dict[int, Logprob]]]:
    ids = list(range(len(pieces)))
    shown = [piece.decode("utf-8", errors="replace") for piece in pieces]
    return ids, [{i: Logprob(-0.5, 1, shown[i], piece)} for i, piece in enumerate(pieces)]


def logprob_texts(response: dict, index: int = 0) -> list[bytes]:
    entries = response["output"][index]["content"][0]["logprobs"]
    return [bytes(entry["bytes"]) for entry in entries]


def finished(writer: ResponseWriter) -> dict:
    writer.close(USAGE)
    events = read_events(b"".join(writer.take()))
    done = [event for event in events if event["type"] == "response.output_text.done"]
    assert [event["logprobs"] for event in done] == [
        item["content"][0]["logprobs"] for item in events[-1]["response"]["output"] if item["type"] == "message"
    ]
    return check_response(events[-1]["response"])


def test_logprobs_come_with_the_text_of_their_tokens() -> None:
    writer = new_writer(top_logprobs=1)
    ids, values = tokens(b"caf", b"\xc3", b"\xa9", b"<eos>")
    writer.feed(TurnDelta(0, [ContentDelta("caf")], ids[:1], values[:1]))
    writer.feed(TurnDelta(0, [], ids[1:2], values[1:2]))  # half a character: nothing to show yet
    writer.feed(TurnDelta(0, [ContentDelta("\u00e9")], ids[2:3], values[2:3]))
    writer.feed(TurnDelta(0, [], ids[3:], values[3:], finish_reason="stop"))
    response = finished(writer)
    assert logprob_texts(response) == [b"caf", b"\xc3", b"\xa9", b"<eos>"]
    entry = response["output"][0]["content"][0]["logprobs"][0]
    top = {"token": "caf", "logprob": -0.5, "bytes": [99, 97, 102]}
    assert entry == {**top, "top_logprobs": [top]}


def test_logprobs_of_thoughts_and_calls_are_not_shown_as_the_texts() -> None:
    ids, values = tokens(b"4", b"</think>", b"It is ", b"4", b"<call>", b"{}")
    thoughts, text, calls = [ReasoningDelta("4")], [ContentDelta("It is 4")], call(0, "{}")
    whole = new_writer(top_logprobs=0)
    whole.feed(TurnDelta(0, [*thoughts, *text, *calls], ids, values, finish_reason="stop"), num_reasoning=2)
    assert logprob_texts(finished(whole), 1) == [b"It is ", b"4"]
    pieces = new_writer(top_logprobs=0)
    pieces.feed(TurnDelta(0, list(thoughts), ids[:1], values[:1]))
    pieces.feed(TurnDelta(0, [ContentDelta("It is ")], ids[1:3], values[1:3]))
    pieces.feed(TurnDelta(0, [ContentDelta("4"), *calls], ids[3:], values[3:], finish_reason="stop"))
    assert logprob_texts(finished(pieces), 1) == [b"It is ", b"4"]


def test_values_that_are_not_asked_for_are_an_empty_list() -> None:
    writer = new_writer()
    ids, values = tokens(b"a")
    writer.feed(TurnDelta(0, [ContentDelta("a")], ids, values, finish_reason="stop"))
    writer.close(USAGE)
    deltas = [event for event in read_events(b"".join(writer.take())) if event["type"].endswith("text.delta")]
    assert json.dumps([event["logprobs"] for event in deltas]) == "[[]]"
