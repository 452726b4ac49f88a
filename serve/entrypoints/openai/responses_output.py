"""What a Response is made of: the items of its output, its counts, and the object around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from serve.entrypoints.asgi import JsonObject
from serve.entrypoints.http_errors import ErrorReply
from serve.entrypoints.openai.responses_protocol import ResponsesRequest, TextFormat

ItemKind = Literal["message", "reasoning", "function_call"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

RUNNING: Final[tuple[Status, ...]] = ("queued", "in_progress")
ID_PREFIXES: Final[dict[ItemKind, str]] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_PLAIN_TEXT: Final[JsonObject] = {"type": "text"}


@dataclass(slots=True)
class OutputItem:
    """One item of the output while it is written; logprobs has the values of a message's tokens, None if not asked."""

    kind: ItemKind
    item_id: str
    index: int
    call_id: str = ""
    name: str = ""
    status: Status = "in_progress"
    pieces: list[str] = field(default_factory=list)
    logprobs: list[JsonObject] | None = None

    @property
    def text(self) -> str:
        """The text, the thoughts or the arguments so far."""
        return "".join(self.pieces)

    def part(self) -> JsonObject:
        """Give the content part of a message or of thoughts."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs or []}

    def describe(self) -> JsonObject:
        """Give the item as clients read it."""
        if self.kind == "function_call":
            return {
                "id": self.item_id,
                "type": "function_call",
                "call_id": self.call_id,
                "name": self.name,
                "arguments": self.text,
                "status": self.status,
            }
        # An item that has just begun has no part yet: the part is an event of its own.
        content = [self.part()] if self.pieces or self.status != "in_progress" else []
        if self.kind == "reasoning":
            return {
                "id": self.item_id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": None,
                "status": self.status,
            }
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "status": self.status,
        }


@dataclass(slots=True)
class ResponseObject:
    """A Response: what never changes, and how far it has come. times are wall-clock seconds."""

    response_id: str
    model: str
    created_at: int
    echo: JsonObject
    status: Status = "in_progress"
    output: list[OutputItem] = field(default_factory=list)
    usage: JsonObject | None = None
    error: JsonObject | None = None
    completed_at: int | None = None

    def describe(self) -> JsonObject:
        """Give the object as clients read it."""
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": self.completed_at,
            "status": self.status,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "model": self.model,
            "output": [item.describe() for item in self.output],
            "usage": self.usage,
            **self.echo,
        }


def echoed_fields(request: ResponsesRequest, *, temperature: float, top_p: float) -> JsonObject:
    """Give the parameters that a Response repeats: as sent, or the default that was used."""
    sent_text, sent_reasoning = request.text, request.reasoning
    answer_format = None if sent_text is None else sent_text.format
    return {
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "temperature": temperature,
        "top_p": top_p,
        "top_logprobs": request.top_logprobs,
        "tools": [_echoed_tool(tool) for tool in request.tools],
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "text": {
            "format": _PLAIN_TEXT if answer_format is None else _echoed_format(answer_format),
            "verbosity": (None if sent_text is None else sent_text.verbosity) or "medium",
        },
        "reasoning": {
            "effort": None if sent_reasoning is None else sent_reasoning.effort,
            "summary": None if sent_reasoning is None else sent_reasoning.summary,
        },
        "truncation": request.truncation,
        "background": request.background,
        "store": request.store,
        "metadata": request.metadata or {},
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "service_tier": "default",
    }


def _echoed_tool(tool: JsonObject) -> JsonObject:
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict"),
    }


def _echoed_format(sent: TextFormat) -> JsonObject:
    if sent.type != "json_schema":
        return {"type": sent.type}
    return {
        "type": "json_schema",
        "name": sent.name,
        "schema": sent.schema_,
        "description": sent.description,
        "strict": sent.strict,
    }


def usage_counts(input_tokens: int, output_tokens: int, *, cached: int, written: int, reasoning: int) -> JsonObject:
    """Give the counts of tokens; written went into the prefix cache, cached came from it."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": input_tokens + output_tokens,
    }


def error_object(reply: ErrorReply) -> JsonObject:
    """Give the error of a Response that failed, under the words that clients know."""
    if reply.status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if reply.status < 500 else "server_error"
    return {"code": code, "message": reply.message}


def window_of(entries: Sequence[JsonObject], text: str, *, is_last: bool) -> list[JsonObject]:
    """Give the tokens that spell a text among tokens of other parts; none when the text is not found.

    entries are logprobs of consecutive tokens, with their bytes; of several places the last or the first is taken.
    """
    ends: list[int] = []
    joined = bytearray()
    for entry in entries:
        piece = entry["bytes"]
        assert isinstance(piece, list), "logprobs entries carry the token's bytes"
        joined += bytes(piece)
        ends.append(len(joined))
    wanted = text.encode()
    start = joined.rfind(wanted) if is_last else joined.find(wanted)
    if start < 0 or not wanted:
        return []
    end = start + len(wanted)
    starts = [0, *ends[:-1]]
    return [entry for entry, a, b in zip(entries, starts, ends, strict=True) if a < end and b > start]
