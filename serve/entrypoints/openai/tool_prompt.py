"""Phase 1 of 11: tools and calls as plain text, for chat templates that know neither.

A template that never mentions tools would drop them, and render the messages of a conversation with calls wrongly. For
such a model the tools are described in the system message, and calls and results become text, in the form that its
parser reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from serve.entrypoints.app_state import Services
from serve.entrypoints.asgi import JsonObject
from serve.entrypoints.openai.tools import is_object

_INTRODUCTION: Final = "You may call functions. These are their signatures, one JSON object a line:\n"
_HERMES: Final = (
    "To call a function, write its name and its arguments as JSON between two marks:\n"
    '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>'
)
# How a model is told to write calls, by the name of the parser that will read them. Others keep to their own way.
_HOW_TO_CALL: Final = {
    "hermes": _HERMES,
    "llama3_json": ('To call a function, answer with JSON only: {"name": "NAME", "parameters": {"KEY": "VALUE"}}'),
    "pythonic": 'To call functions, answer with a list of calls only: [NAME(KEY="VALUE")]',
}
_TEXT_TYPES: Final = ("text", "input_text", "output_text")


def messages_with_tools(
    services: Services,
    messages: list[JsonObject],
    tools: Sequence[JsonObject] | None,
    *,
    chat_template: str | None = None,
) -> list[JsonObject]:
    """Give the messages to render: as they are, or with tools, calls and results as text if the template lacks them.

    chat_template is the request's own template, if it sent one.
    """
    template = services.renderer.template_text(chat_template, has_tools=bool(tools))
    if template is None or "tools" in template or "tool_call" in template:
        return messages
    if tools:
        messages = _with_description(messages, _description(services, tools), template)
    if any(message.get("role") == "tool" or message.get("tool_calls") for message in messages):
        messages = _with_calls_as_text(messages)
    return messages


def _description(services: Services, tools: Sequence[JsonObject]) -> str:
    lines = "\n".join(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools)
    parser = services.answer_format.tools
    how = _HERMES if parser is None else _HOW_TO_CALL.get(parser.name, "")
    return f"{_INTRODUCTION}{lines}\n\n{how}".rstrip()


def _with_description(messages: list[JsonObject], text: str, template: str) -> list[JsonObject]:
    """Add a text to the first system message, or to the first message where a template takes no system message."""
    takes_system = "System role not supported" not in template and (
        "system" in template or "raise_exception" not in template
    )
    role = "system" if takes_system else "user"
    at = 0 if messages and messages[0].get("role") in (role, "developer") else None
    if at is None and not takes_system:
        at = next((i for i, message in enumerate(messages) if message.get("role") == role), None)
    if at is None:
        return [{"role": role, "content": text}, *messages]
    order = (messages[at].get("content"), text) if takes_system else (text, messages[at].get("content"))
    return [*messages[:at], {**messages[at], "content": _joined(*order)}, *messages[at + 1 :]]


def _joined(first: object, second: object) -> object:
    """Join two contents, one of which may be a list of parts; what is no content stays for the renderer to refuse."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}" if first else second
    if isinstance(first, str) and isinstance(second, list):
        return [{"type": "text", "text": first}, *second]
    if isinstance(first, list) and isinstance(second, str):
        return [*first, {"type": "text", "text": second}]
    return second if first is None else first


def _with_calls_as_text(messages: list[JsonObject]) -> list[JsonObject]:
    """Write calls into the assistant's text, and the results that follow each other into one user message."""
    result: list[JsonObject] = []
    is_results = False
    for message in messages:
        if _is_result(message):
            text = f"<tool_response>\n{_text_of(message.get('content'))}\n</tool_response>"
            if is_results:
                result[-1] = {"role": "user", "content": f"{result[-1]['content']}\n{text}"}
            else:
                result.append({"role": "user", "content": text})
            is_results = True
            continue
        is_results = False
        result.append(_with_own_calls(message))
    return result


def _with_own_calls(message: JsonObject) -> JsonObject:
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list) or not all(map(_is_call, calls)):
        return message
    texts = [_call_text(call["function"]) for call in calls]
    content = message.get("content")
    if isinstance(content, (str, list)) and content:
        return {**_without_calls(message), "content": _joined(content, "\n".join(texts))}
    return {**_without_calls(message), "content": "\n".join(texts)}


def _without_calls(message: JsonObject) -> JsonObject:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _is_result(message: JsonObject) -> bool:
    """Tell whether a message is a well-formed result of a call; what is not stays for the renderer to refuse."""
    if message.get("role") != "tool" or not isinstance(message.get("tool_call_id"), str):
        return False
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [
        part.get("text") if is_object(part) and part.get("type", "text") in _TEXT_TYPES else part for part in parts
    ]
    return all(isinstance(text, str) for text in texts)


def _is_call(call: object) -> bool:
    if not is_object(call) or call.get("type", "function") != "function":
        return False
    function = call.get("function")
    return is_object(function) and isinstance(function.get("name"), str)


def _call_text(function: JsonObject) -> str:
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {text.strip() or "{}"}}}\n</tool_call>'


def _text_of(content: object) -> str:
    """Give the text of a tool message; parts are joined as the renderer joins them."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if is_object(part) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))
