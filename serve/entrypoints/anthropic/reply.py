"""Phase 11 of 11 for the Messages API: the parts that a plain answer and a stream share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pydantic import TypeAdapter

from serve.entrypoints.asgi import JsonObject
from serve.entrypoints.openai.turn import Turn, TurnDelta
from serve.errors import RequestFailed
from serve.renderers.output_events import CallDelta, CallStart, ContentDelta, Event, ReasoningDelta

_OBJECT: Final = TypeAdapter(dict[str, object])


@dataclass(slots=True)
class Block:
    """One block of an answer; text is the thoughts of a thinking block and the arguments of a call."""

    kind: str
    text: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(slots=True)
class AnswerBlocks:
    """Gathers events into blocks: a new one where the kind changes, and one for each call."""

    blocks: list[Block] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Take the next events."""
        for event in events:
            match event:
                case ContentDelta(text):
                    self._last("text").text += text
                case ReasoningDelta(text):
                    self._last("thinking").text += text
                case CallStart(_, call_id, name):
                    self.blocks.append(Block("tool_use", call_id=call_id, name=name))
                case CallDelta(_, arguments):
                    self._last("tool_use").text += arguments

    def _last(self, kind: str) -> Block:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        return self.blocks[-1]

    def content(self, *, hides_thoughts: bool) -> list[JsonObject]:
        """Give the blocks in the API's form. An answer of nothing is one empty text, which clients look for."""
        return [_content_block(block, hides_thoughts) for block in self.blocks or [Block("text")]]


def _content_block(block: Block, hides_thoughts: bool) -> JsonObject:
    match block.kind:
        case "thinking":
            thoughts = "" if hides_thoughts else block.text
            return {"type": "thinking", "thinking": thoughts, "signature": sign(block.text)}
        case "tool_use":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": parse_arguments(block.text)}
        case _:
            return {"type": "text", "text": block.text}


def parse_arguments(text: str) -> JsonObject:
    """Give the object of a call's arguments; of text that was cut short, the values that are whole."""
    return _OBJECT.validate_json(text, experimental_allow_partial=True) if text else {}


def sign(thoughts: str) -> str:
    """Give the mark that clients keep with a thinking block and send back; nothing is checked by it."""
    return hashlib.sha256(thoughts.encode("utf-8", errors="replace")).hexdigest()


def stop_fields(last: TurnDelta, *, has_calls: bool) -> JsonObject:
    """Give stop_reason and stop_sequence from the delta that ends an answer."""
    if last.finish_reason == "abort":
        raise RequestFailed("the operator of the server aborted the request", cause="aborted")
    if last.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(last.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


def usage(turn: Turn) -> JsonObject:
    """Give the tokens so far; input_tokens is the whole prompt, as count_tokens gives it."""
    return {
        "input_tokens": len(turn.prompt.token_ids),
        "output_tokens": sum(turn.num_generated),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": turn.num_cached_tokens,
        "output_tokens_details": {"thinking_tokens": sum(turn.num_reasoning)},
    }


def message_fields(message_id: str, model: str) -> JsonObject:
    """Give what a message begins with."""
    return {"id": message_id, "type": "message", "role": "assistant", "model": model}
