"""Phase 11 of 11 for the Messages API: the events of a streamed answer, one block open at a time."""

from __future__ import annotations

import msgspec

from serve.entrypoints.anthropic.reply import Block, message_fields, sign, stop_fields, usage
from serve.entrypoints.asgi import JsonObject
from serve.entrypoints.openai.generation import Generation
from serve.entrypoints.openai.turn import Turn, TurnDelta
from serve.renderers.output_events import CallDelta, CallStart, ContentDelta, Event, ReasoningDelta

_encode = msgspec.json.Encoder().encode


class MessageStreamWriter:
    """Turns the deltas of one turn into events."""

    def __init__(self, generation: Generation, turn: Turn, *, hides_thoughts: bool) -> None:
        self._generation = generation
        self._turn = turn
        self._hides_thoughts = hides_thoughts
        self._block: Block | None = None
        self._index = -1
        self._has_calls = False
        self._last: TurnDelta | None = None

    def opening(self) -> bytes:
        """Give message_start: a message with nothing in it yet."""
        message = message_fields(self._generation.response_id, self._generation.model)
        message |= {"content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = usage(self._turn) | {"output_tokens": 0}
        return _event("message_start", {"message": message})

    def events(self, delta: TurnDelta) -> bytes:
        """Give the events of one delta; empty when nothing in it can be shown yet."""
        if delta.finish_reason is not None:
            self._last = delta
        return b"".join([self._write(event) for event in delta.events])

    def closing(self) -> bytes:
        """Give what ends the message, with its stop reason and the final counts."""
        assert self._last is not None, "a turn ends with the delta that says why"
        end = b"" if self._block is not None or self._index >= 0 else self._start(Block("text"))
        fields = stop_fields(self._last, has_calls=self._has_calls)
        delta = _event("message_delta", {"delta": fields, "usage": usage(self._turn)})
        return end + self._stop() + delta + _event("message_stop", {})

    def _write(self, event: Event) -> bytes:
        match event:
            case ContentDelta(text):
                return self._enter("text") + self._delta("text_delta", "text", text)
            case ReasoningDelta(text):
                start = self._enter("thinking")
                assert self._block is not None, "just entered"
                self._block.text += text
                return start if self._hides_thoughts else start + self._delta("thinking_delta", "thinking", text)
            case CallStart(_, call_id, name):
                self._has_calls = True
                return self._start(Block("tool_use", call_id=call_id, name=name))
            case CallDelta(_, arguments):
                return self._delta("input_json_delta", "partial_json", arguments)

    def _enter(self, kind: str) -> bytes:
        """Make sure that a block of this kind is open."""
        if self._block is not None and self._block.kind == kind:
            return b""
        return self._start(Block(kind))

    def _start(self, block: Block) -> bytes:
        end = self._stop()
        self._block = block
        self._index += 1
        return end + _event("content_block_start", {"index": self._index, "content_block": _empty(block)})

    def _stop(self) -> bytes:
        """Close the open block, if there is one; thoughts get their mark first."""
        block, self._block = self._block, None
        if block is None:
            return b""
        mark = self._delta("signature_delta", "signature", sign(block.text)) if block.kind == "thinking" else b""
        return mark + _event("content_block_stop", {"index": self._index})

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": {"type": kind, field: text}})


def _empty(block: Block) -> JsonObject:
    match block.kind:
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "tool_use":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        case _:
            return {"type": "text", "text": ""}


def _event(name: str, fields: JsonObject) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name, **fields}) + b"\n\n"
