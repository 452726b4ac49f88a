"""Phase 11 of 11 of the Responses API: deltas of a turn become items, and events in the order clients expect.

Plain and streamed answers are built by the same writer, so they cannot differ.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec

from serve.entrypoints.asgi import JsonObject
from serve.entrypoints.http_errors import ErrorReply
from serve.entrypoints.openai.logprobs import chat_logprobs
from serve.entrypoints.openai.responses_input import new_id
from serve.entrypoints.openai.responses_output import (
    ID_PREFIXES,
    ItemKind,
    OutputItem,
    ResponseObject,
    Status,
    error_object,
    window_of,
)
from serve.entrypoints.openai.turn import TurnDelta
from serve.renderers.output_events import CallDelta, CallStart, ContentDelta, ReasoningDelta

_DELTA_EVENTS: Final[dict[ItemKind, str]] = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
_STATUSES: Final[dict[str, Status]] = {"length": "incomplete", "abort": "cancelled"}
# There is no event for cancelled: clients end a stream at one of these three.
_LAST_EVENTS: Final[dict[Status, str]] = {"completed": "response.completed", "failed": "response.failed"}
_encode = msgspec.json.encode


class ResponseWriter:
    """Writes one Response: open(), feed() for each delta, then close() or fail(); take() gives the events so far.

    sequence numbers count all events from 0. Text of nothing but blanks between thoughts and calls is no message.
    """

    def __init__(self, response: ResponseObject, *, top_logprobs: int | None = None, as_ids: bool = False) -> None:
        """Start with a Response that has no output; top_logprobs is None when no logprobs were asked for."""
        self.response = response
        self.is_over = False
        self._top = top_logprobs
        self._as_ids = as_ids
        self._events: list[bytes] = []
        self._num_events = 0
        self._open: OutputItem | None = None
        self._blanks = ""
        self._unclaimed: list[JsonObject] = []
        self._finish_reason = ""

    def take(self) -> list[bytes]:
        """Give the events that were written since the last call, one block of bytes each."""
        events, self._events = self._events, []
        return events

    def open(self) -> None:
        """Write the events that come before any output."""
        self._emit_response("response.created")
        if self.response.status == "queued":
            self._emit_response("response.queued")
        else:
            self._emit_response("response.in_progress")

    def start(self) -> None:
        """Note that a queued response has begun."""
        if self.response.status == "queued":
            self.response.status = "in_progress"
            self._emit_response("response.in_progress")

    def feed(self, delta: TurnDelta, *, num_reasoning: int = 0) -> None:
        """Take the next delta; num_reasoning of its first tokens are known to be thoughts."""
        logprobs = self._claim_logprobs(delta, num_reasoning)
        for event in delta.events:
            match event:
                case ContentDelta(text):
                    self._add_text(text, logprobs)
                    logprobs = []
                case ReasoningDelta(text):
                    self._add_piece(self._item("reasoning"), text)
                case CallStart(_, call_id, name):
                    self._start_call(call_id, name)
                case CallDelta(_, arguments):
                    self._add_piece(self._item("function_call"), arguments)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason

    def close(self, usage: JsonObject) -> None:
        """Write the end of an answer that the turn has finished."""
        self._end(_STATUSES.get(self._finish_reason, "completed"), usage)

    def cancel(self) -> None:
        """Write the end of an answer that was called off."""
        self._end("cancelled", None)

    def fail(self, reply: ErrorReply) -> None:
        """Write the end of an answer that an error cut off."""
        self._close_item("incomplete")
        code = None if reply.code is None else str(reply.code)
        self._emit("error", {"code": code, "message": reply.message, "param": reply.param})
        self.response.error = error_object(reply)
        self._finish("failed")

    def _end(self, status: Status, usage: JsonObject | None) -> None:
        if status != "cancelled" and (self._blanks or not self.response.output):
            self._flush_blanks()
        self._close_item("completed" if status == "completed" else "incomplete")
        self.response.usage = usage
        self._finish(status)

    def _finish(self, status: Status) -> None:
        self.is_over = True
        self.response.status = status
        if status == "completed":
            self.response.completed_at = int(time.time())
        self._emit_response(_LAST_EVENTS.get(status, "response.incomplete"))

    def _flush_blanks(self) -> None:
        """Write what could have been the space before a call, or the one empty message of an empty answer."""
        text, self._blanks = self._blanks, ""
        if text and self.response.output:
            return
        item = self._item("message")
        if text:
            self._add_piece(item, text, self._take_unclaimed())

    def _add_text(self, text: str, logprobs: list[JsonObject]) -> None:
        if self._open is None or self._open.kind != "message":
            text = self._blanks + text
            if not text or text.isspace():
                self._blanks = text
                self._unclaimed = logprobs + self._unclaimed
                return
            self._blanks = ""
        self._add_piece(self._item("message"), text, logprobs)

    def _start_call(self, call_id: str, name: str) -> None:
        self._close_item("completed")
        self._begin(OutputItem("function_call", self._new_id("function_call"), self._next_index(), call_id, name))

    def _item(self, kind: ItemKind) -> OutputItem:
        """Give the open item of this kind, after closing one of another kind."""
        if self._open is not None and self._open.kind == kind:
            return self._open
        self._close_item("completed")
        item = OutputItem(kind, self._new_id(kind), self._next_index())
        if kind == "message" and self._top is not None:
            item.logprobs = []
        return self._begin(item)

    def _begin(self, item: OutputItem) -> OutputItem:
        self._open = item
        self._blanks = ""
        self.response.output.append(item)
        self._emit("response.output_item.added", {"output_index": item.index, "item": item.describe()})
        if item.kind != "function_call":
            self._emit_for("response.content_part.added", item, {"part": item.part()})
        return item

    def _add_piece(self, item: OutputItem, text: str, logprobs: list[JsonObject] | None = None) -> None:
        if not text:
            return
        item.pieces.append(text)
        fields: JsonObject = {"delta": text}
        if item.kind == "message":
            fields["logprobs"] = logprobs or []
            if item.logprobs is not None:
                item.logprobs += logprobs or []
        self._emit_for(_DELTA_EVENTS[item.kind], item, fields)

    def _close_item(self, status: Status) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status
        if item.kind == "function_call":
            fields: JsonObject = {"name": item.name, "arguments": item.text}
            self._emit_for("response.function_call_arguments.done", item, fields)
        elif item.kind == "reasoning":
            self._emit_for("response.reasoning_text.done", item, {"text": item.text})
        else:
            if item.logprobs is not None:
                item.logprobs += self._take_unclaimed()
            self._emit_for("response.output_text.done", item, {"text": item.text, "logprobs": item.logprobs or []})
        if item.kind != "function_call":
            self._emit_for("response.content_part.done", item, {"part": item.part()})
        self._emit("response.output_item.done", {"output_index": item.index, "item": item.describe()})

    def _claim_logprobs(self, delta: TurnDelta, num_reasoning: int) -> list[JsonObject]:
        """Give the entries of the text in a delta; those of thoughts and calls belong to nothing that shows them.

        Tokens come with the delta that samples them, their text may come with a later one.
        """
        if self._top is None or delta.logprobs is None:
            return []
        block = chat_logprobs(delta.logprobs, delta.token_ids, top=self._top, as_ids=self._as_ids)
        entries = self._take_unclaimed() + block["content"][num_reasoning:]
        texts = [event.text for event in delta.events if isinstance(event, ContentDelta)]
        if not delta.events:
            self._unclaimed = entries
            return []
        is_first_or_more = not self.response.output or (self._open is not None and self._open.kind == "message")
        if len(texts) == len(delta.events) and is_first_or_more:
            return entries
        is_last = len(texts) == len(delta.events) or not isinstance(delta.events[0], ContentDelta)
        return window_of(entries, self._blanks + "".join(texts), is_last=is_last)

    def _take_unclaimed(self) -> list[JsonObject]:
        entries, self._unclaimed = self._unclaimed, []
        return entries

    def _emit_response(self, name: str) -> None:
        self._emit(name, {"response": self.response.describe()})

    def _emit_for(self, name: str, item: OutputItem, fields: JsonObject) -> None:
        place: JsonObject = {"item_id": item.item_id, "output_index": item.index}
        if item.kind != "function_call":
            place["content_index"] = 0
        self._emit(name, place | fields)

    def _emit(self, name: str, fields: JsonObject) -> None:
        body = _encode({"type": name, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        self._events.append(b"event: " + name.encode() + b"\ndata: " + body + b"\n\n")

    def _next_index(self) -> int:
        return len(self.response.output)

    @staticmethod
    def _new_id(kind: ItemKind) -> str:
        return new_id(ID_PREFIXES[kind])
