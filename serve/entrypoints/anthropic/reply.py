"""Phase 11 of 11 for the Messages API: the parts that a plain answer and a stream share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pydantic import TypeAdapter, ValidationError

from serve.entrypoints.asgi import JsonObject
from serve.entrypoints.openai.turn import Turn, TurnDelta
from serve.errors import RequestFailed
from serve.renderers.output_events import CallDelta, CallStart, ContentDelta, Event, ReasoningDelta

_OBJECT: Final = TypeAdapter(dict[str, object])
# The escapes of a JSON string, a pair of surrogates as one, so that a half of a pair is known by its own match.
_ESCAPE: Final = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL
)
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_REPLACEMENT: Final = r"\ufffd"


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

    @property
    def has_calls(self) -> bool:
        """True when there is a call."""
        return any(block.kind == "tool_use" for block in self.blocks)

    def drop_cut_calls(self) -> None:
        """Leave out calls whose arguments are no whole object: a client would run them with the half it got."""
        self.blocks = [block for block in self.blocks if block.kind != "tool_use" or is_whole(block.text)]

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
    """Give the object of a call's arguments; of text that was cut short, the values that are whole.

    Half a surrogate pair, which JSON may write but no text holds, becomes U+FFFD. What no decoder of a client takes
    either (hundreds of levels, a number of thousands of digits) leaves nothing.
    """
    if not text:
        return {}
    try:
        return _OBJECT.validate_json(_ESCAPE.sub(_whole_escape, text), experimental_allow_partial=True)
    except ValidationError:
        return {}


def is_whole(arguments: str) -> bool:
    """Tell whether the arguments of a call are a whole JSON object."""
    try:
        _OBJECT.validate_json(_ESCAPE.sub(_whole_escape, arguments))
    except ValidationError:
        return False
    return True


def _whole_escape(found: re.Match[str]) -> str:
    return _REPLACEMENT if _HALF.fullmatch(found[0]) else found[0]


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
