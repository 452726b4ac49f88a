"""Phase 1 of 11: brings chat messages into the one form that templates see."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final, Literal

from serve.errors import InvalidRequest, shown

ContentFormat = Literal["string", "openai"]
ChatMessage = dict[str, object]

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PART_TYPES: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

# The API's name first; templates read the second, those of gpt-oss the third.
_REASONING_NAMES: Final = ("reasoning", "reasoning_content", "thinking")


def normalize_messages(
    messages: Sequence[object],
    content_format: ContentFormat,
    *,
    knows_developer: bool,
    knows_null_content: bool = False,
    wants_text_arguments: bool = False,
) -> list[ChatMessage]:
    """Check messages and give copies for the template; the given ones stay untouched.

    content_format "string" joins text parts with newlines, "openai" wraps plain strings as one text part. developer
    messages become system messages at the front unless the template knows them. The content of a message that only
    calls tools is empty, or null for a template that asks. Arguments of calls are objects, or their JSON text for a
    template that wants text. Raises InvalidRequest with the path of the field at fault.
    """
    if not messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    result = [_normalize(message, f"messages.{i}", content_format) for i, message in enumerate(messages)]
    for message, given in zip(result, messages, strict=True):
        assert isinstance(given, dict), "checked by _normalize"
        if knows_null_content and "tool_calls" in message and given.get("content") is None:
            message["content"] = None
        if wants_text_arguments and "tool_calls" in message:
            message["tool_calls"] = [_with_text_arguments(call) for call in given["tool_calls"]]
    if not knows_developer and any(message["role"] == "developer" for message in result):
        return _developer_to_system(result, content_format)
    return result


def count_chars(value: object) -> int:
    """Sum the lengths of all strings inside a JSON value, keys included."""
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        else:
            total += len(str(item))
    return total


def content_chars(messages: Sequence[object]) -> int:
    """Sum the lengths of the texts that messages carry as content; what is not text counts nothing."""
    total = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [content]
        texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
        total += sum(len(text) for text in texts if isinstance(text, str))
    return total


def _normalize(message: object, path: str, content_format: ContentFormat) -> ChatMessage:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{path} must be an object with role and content", param=path)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{path}.role is {shown(role)}; the roles are {', '.join(ROLES)}", param=f"{path}.role")
    result = {str(key): value for key, value in message.items() if value is not None}
    as_string = content_format == "string" or role in ("tool", "function")
    content = message.get("content")
    if content is None and role != "assistant":
        raise InvalidRequest(
            f"{path}.content is missing; only assistant messages may have none", param=f"{path}.content"
        )
    parts = _text_parts(content, f"{path}.content")
    result["content"] = "\n".join(parts) if as_string else [{"type": "text", "text": text} for text in parts]
    extra = _ROLE_RULES.get(role)
    if extra is not None:
        extra(result, path)
    return result


def _text_parts(content: object, path: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} must be a string or a list of parts", param=path)
    return [_part_text(part, f"{path}.{i}") for i, part in enumerate(content)]


def _part_text(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{path} must be a string or an object with type and text", param=path)
    kind = part.get("type", "text")
    field = _TEXT_PART_TYPES.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise InvalidRequest(f"{path}.type is {shown(kind)}; this model accepts: text", param=f"{path}.type")
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{field} must be a string", param=f"{path}.{field}")
    return text


def _fix_assistant(message: ChatMessage, path: str) -> None:
    """Parse tool call arguments, drop an empty call list, give reasoning under every name that templates read."""
    given = next((name for name in _REASONING_NAMES if name in message), None)
    if given is not None:
        if not isinstance(message[given], str):
            raise InvalidRequest(f"{path}.{given} must be a string", param=f"{path}.{given}")
        message.update(dict.fromkeys(_REASONING_NAMES, message[given]))
    calls = message.pop("tool_calls", None)
    if calls is None or calls == []:
        return
    if not isinstance(calls, list):
        raise InvalidRequest(f"{path}.tool_calls must be a list", param=f"{path}.tool_calls")
    message["tool_calls"] = [_parsed_call(call, f"{path}.tool_calls.{i}") for i, call in enumerate(calls)]


def _parsed_call(call: object, path: str) -> ChatMessage:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or call.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"{path} must be an object of type function with a function field", param=path)
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{path}.function.name must be a string", param=f"{path}.function.name")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _parsed_arguments(arguments)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _parsed_arguments(text: str) -> object:
    """Give the object written in text; text that is no JSON object stays text."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _with_text_arguments(call: ChatMessage) -> ChatMessage:
    """Give a checked call with its arguments as JSON text: as they were sent, if they were sent as text."""
    function = call["function"]
    assert isinstance(function, dict), "checked by _parsed_call"
    arguments = function.get("arguments")
    if not isinstance(arguments, str) or not arguments.strip():
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _check_tool(message: ChatMessage, path: str) -> None:
    if not isinstance(message.get("tool_call_id"), str):
        raise InvalidRequest(
            f"{path}.tool_call_id is missing; a tool message names the call it answers", param=f"{path}.tool_call_id"
        )


_ROLE_RULES: Final[dict[str, Callable[[ChatMessage, str], None]]] = {"assistant": _fix_assistant, "tool": _check_tool}


def _developer_to_system(messages: list[ChatMessage], content_format: ContentFormat) -> list[ChatMessage]:
    """Make one system message of all system and developer messages and put it first."""
    merged = [message for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    first = {**merged[0], "role": "system"}
    if len(merged) > 1:
        text = "\n\n".join(_text_of(message["content"]) for message in merged)
        # One part: there are templates that read only the first part of a system message.
        first["content"] = text if content_format == "string" else [{"type": "text", "text": text}]
    return [first, *others]


def _text_of(content: object) -> str:
    """Give normalized content as one text."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else str(content)
