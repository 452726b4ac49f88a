"""Phase 1 of 11 for the Messages API: makes a chat request of its system text, blocks, tools and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Final

import msgspec

from serve.entrypoints.anthropic.protocol import MessagesRequest, PromptRequest, ToolChoice
from serve.entrypoints.asgi import JsonObject
from serve.entrypoints.openai.protocol import ChatCompletionRequest, parse_request
from serve.errors import InvalidRequest, shown

# Claude Code puts a line in front of its system text that changes with every request; with it no prompt would ever
# share its beginning with an earlier one.
_BILLING_LINE: Final = "x-anthropic-billing-header"
_ERROR_PREFIX: Final = "Error: "
_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_ROLES: Final = ("user", "assistant", "system")

Block = Mapping[str, object]


def to_chat(body: PromptRequest, *, can_think: bool) -> ChatCompletionRequest:
    """Give the chat request that a body stands for.

    can_think is False for a model whose answers hold no thoughts: what a client says about them then means nothing.
    Raises InvalidRequest.
    """
    messages = _messages(body)
    fields: JsonObject = {"model": body.model, "messages": messages}
    if _is_open(body, messages):
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    fields |= _tool_fields(body) | _thinking_fields(body, can_think=can_think)
    schema = body.schema_of_text
    if schema is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if isinstance(body, MessagesRequest):
        fields |= body.chat_fields() | {
            "max_tokens": body.max_tokens,
            "stream": body.stream,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return parse_request(ChatCompletionRequest, fields)


def _messages(body: PromptRequest) -> list[JsonObject]:
    result: list[JsonObject] = []
    system = [text for text in _texts(body.system, "system") if not text.startswith(_BILLING_LINE)]
    if any(system):
        result.append({"role": "system", "content": _content(system)})
    turns = [
        (_role(message, f"messages.{i}"), f"messages.{i}.content", message) for i, message in enumerate(body.messages)
    ]
    tool_names: dict[str, str] = {}
    # Turns in a row by one side are one turn, as Anthropic reads them: many templates only know turns that alternate.
    for role, run in groupby(turns, key=lambda turn: turn[0]):
        blocks = [block for _, path, message in run for block in _blocks(message.get("content"), path)]
        result += _WRITERS[role](blocks, tool_names)
    # An empty last turn of the assistant is not there to be gone on from.
    if result[-1] == {"role": "assistant", "content": ""}:
        result.pop()
    return result


def _role(message: Block, path: str) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{path}.role is {shown(role)}; the roles are {', '.join(_ROLES)}", param=f"{path}.role")
    return role


def _blocks(content: object, path: str) -> list[tuple[str, Block]]:
    """Give the blocks of a message, each with its path; a string is one block of text."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} must be a string or a list of blocks", param=path)
    blocks: list[tuple[str, Block]] = []
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise InvalidRequest(f"{path}.{i} must be an object with a type", param=f"{path}.{i}")
        blocks.append((f"{path}.{i}", block))
    return blocks


def _texts(content: object, path: str) -> list[str]:
    """Give the texts of content that may hold text only; nothing for None."""
    if content is None:
        return []
    texts = []
    for where, block in _blocks(content, path):
        if block.get("type") != "text":
            raise _unknown_type(block, where, ("text",))
        texts.append(_string(block, "text", where))
    return texts


def _string(block: Block, name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}.{name} must be a string", param=f"{path}.{name}")
    return value


def _unknown_type(block: Block, path: str, known: tuple[str, ...]) -> InvalidRequest:
    kind = shown(block.get("type"))
    return InvalidRequest(f"{path}.type is {kind}; this model accepts: {', '.join(known)}", param=f"{path}.type")


def _content(texts: list[str]) -> object:
    """Give texts as content: one as a string, more as parts, which each template joins or keeps in its own way."""
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def _user_messages(blocks: list[tuple[str, Block]], tool_names: dict[str, str]) -> list[JsonObject]:
    """Give one tool message for each result, in front of the text: results follow the turn that made the calls."""
    results: list[JsonObject] = []
    texts: list[str] = []
    for path, block in blocks:
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", path))
            case "tool_result":
                results.append(_tool_message(block, path, tool_names))
            case _:
                raise _unknown_type(block, path, ("text", "tool_result"))
    if texts or not results:
        results.append({"role": "user", "content": _content(texts)})
    return results


def _tool_message(block: Block, path: str, tool_names: dict[str, str]) -> JsonObject:
    call_id = _string(block, "tool_use_id", path)
    text = "\n".join(_texts(block.get("content"), f"{path}.content"))
    if block.get("is_error") is True:
        # Chat messages have no such mark; the model learns it from the text.
        text = _ERROR_PREFIX + text
    message: JsonObject = {"role": "tool", "tool_call_id": call_id, "content": text}
    if call_id in tool_names:
        message["name"] = tool_names[call_id]
    return message


def _assistant_messages(blocks: list[tuple[str, Block]], tool_names: dict[str, str]) -> list[JsonObject]:
    """Give one message with the texts, thoughts and calls of a turn; what only Anthropic can read is left out."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonObject] = []
    for path, block in blocks:
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", path))
            case "thinking":
                thoughts.append(_string(block, "thinking", path))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block, path))
                tool_names[_string(block, "id", path)] = _string(block, "name", path)
            case _:
                raise _unknown_type(block, path, ("text", "thinking", "redacted_thinking", "tool_use"))
    message: JsonObject = {"role": "assistant", "content": None if calls and not texts else _content(texts)}
    if any(thoughts):
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(block: Block, path: str) -> JsonObject:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{path}.input must be an object", param=f"{path}.input")
    function = {"name": _string(block, "name", path), "arguments": msgspec.json.encode(arguments).decode()}
    return {"id": _string(block, "id", path), "type": "function", "function": function}


def _system_messages(blocks: list[tuple[str, Block]], tool_names: dict[str, str]) -> list[JsonObject]:
    texts = []
    for path, block in blocks:
        if block.get("type") != "text":
            raise _unknown_type(block, path, ("text",))
        texts.append(_string(block, "text", path))
    return [{"role": "system", "content": _content(texts)}]


_Writer = Callable[[list[tuple[str, Block]], dict[str, str]], list[JsonObject]]
_WRITERS: Final[dict[str, _Writer]] = {
    "user": _user_messages,
    "assistant": _assistant_messages,
    "system": _system_messages,
}


def _is_open(body: PromptRequest, messages: list[JsonObject]) -> bool:
    """Tell whether the answer goes on from the text of a last assistant turn."""
    return bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]


def _tool_fields(body: PromptRequest) -> JsonObject:
    if not body.tools:
        return {}
    tools = []
    for tool in body.tools:
        function: JsonObject = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        tools.append({"type": "function", "function": function})
    choice = body.tool_choice or ToolChoice(type="auto")
    named = {"type": "function", "function": {"name": choice.name}}
    return {
        "tools": tools,
        "tool_choice": _TOOL_CHOICES.get(choice.type, named),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _thinking_fields(body: PromptRequest, *, can_think: bool) -> JsonObject:
    """Give what a template and the engine are told about thinking; what the client tells the template itself wins."""
    template = dict(body.chat_template_kwargs or {})
    fields: JsonObject = {}
    thinking = body.thinking
    if thinking is not None:
        template.setdefault("enable_thinking", thinking.type != "disabled")
        if can_think and thinking.type == "enabled" and thinking.budget_tokens is not None:
            fields["thinking_token_budget"] = thinking.budget_tokens
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if template:
        fields["chat_template_kwargs"] = template
    return fields
