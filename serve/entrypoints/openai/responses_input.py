"""Items of the Responses API: what a request brings, checked and with ids, and the chat messages they stand for."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from serve.entrypoints.openai.fields import MAX_MESSAGES
from serve.errors import InvalidRequest, shown

Item = dict[str, object]
ChatMessage = dict[str, object]
FindItem = Callable[[str], Item | None]

ROLES: Final = ("user", "assistant", "system", "developer")
TEXT_PARTS: Final = ("input_text", "output_text", "text", "refusal")


def new_id(prefix: str) -> str:
    """Give a fresh id of an item or a call."""
    return prefix + uuid.uuid4().hex


def read_input(value: object, find_item: FindItem) -> list[Item]:
    """Check the input of a request and give its items in one form, each with an id.

    A string is one message of the user. find_item looks up what an item_reference names. Raises InvalidRequest with
    the path of the field at fault.
    """
    if isinstance(value, str):
        return [_message({"role": "user", "content": value}, "input")]
    if not isinstance(value, list):
        raise InvalidRequest("input must be a string or a list of items", param="input")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"input must hold at most {MAX_MESSAGES} items, got {len(value)}", param="input")
    items: list[Item] = []
    for index, item in enumerate(value):
        path = f"input.{index}"
        if not isinstance(item, dict):
            raise InvalidRequest(f"{path} must be an object", param=path)
        items.append(_read_item(item, path, find_item))
    return items


def _read_item(item: Item, path: str, find_item: FindItem) -> Item:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "item_reference":
        return _referenced(item, path, find_item)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise InvalidRequest(
            f"{path}.type is {shown(kind)}; this server takes: {', '.join((*_READERS, 'item_reference'))}",
            param=f"{path}.type",
        )
    return read(item, path)


def _referenced(item: Item, path: str, find_item: FindItem) -> Item:
    item_id = _text_field(item, "id", path)
    found = find_item(item_id)
    if found is None:
        raise InvalidRequest(
            f"{path} refers to the item {item_id[:80]!r}, which this server does not have; send the item itself",
            param=f"{path}.id",
        )
    return found


def _message(item: Item, path: str) -> Item:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{path}.role is {shown(role)}; the roles are {', '.join(ROLES)}", param=f"{path}.role")
    content = item.get("content")
    if content is None:
        raise InvalidRequest(f"{path}.content is missing", param=f"{path}.content")
    texts = _texts(content, f"{path}.content")
    parts: list[Item] = [
        {"type": "output_text", "text": text, "annotations": []}
        if role == "assistant"
        else {"type": "input_text", "text": text}
        for text in texts
    ]
    return {"id": _id(item, "msg_"), "type": "message", "role": role, "content": parts, "status": _status(item)}


def _function_call(item: Item, path: str) -> Item:
    return {
        "id": _id(item, "fc_"),
        "type": "function_call",
        "call_id": _text_field(item, "call_id", path),
        "name": _text_field(item, "name", path),
        "arguments": _text_field(item, "arguments", path),
        "status": _status(item),
    }


def _function_call_output(item: Item, path: str) -> Item:
    output = item.get("output")
    if output is None:
        raise InvalidRequest(f"{path}.output is missing", param=f"{path}.output")
    if not isinstance(output, str):
        output = [{"type": "input_text", "text": text} for text in _texts(output, f"{path}.output")]
    return {
        "id": _id(item, "fco_"),
        "type": "function_call_output",
        "call_id": _text_field(item, "call_id", path),
        "output": output,
        "status": _status(item),
    }


def _reasoning(item: Item, path: str) -> Item:
    """Keep the thoughts; encrypted ones were written by another server and cannot be read here."""
    summary = _texts(item.get("summary") or [], f"{path}.summary", ("summary_text",))
    content = _texts(item.get("content") or [], f"{path}.content", ("reasoning_text", "text"))
    return {
        "id": _id(item, "rs_"),
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text} for text in summary],
        "content": [{"type": "reasoning_text", "text": text} for text in content],
    }


_READERS: Final[dict[str, Callable[[Item, str], Item]]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}


def _id(item: Item, prefix: str) -> str:
    sent = item.get("id")
    return sent if isinstance(sent, str) and sent else new_id(prefix)


def _status(item: Item) -> str:
    return "incomplete" if item.get("status") == "incomplete" else "completed"


def _text_field(item: Item, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}.{name} must be a string", param=f"{path}.{name}")
    return value


def _texts(content: object, path: str, kinds: tuple[str, ...] = TEXT_PARTS) -> list[str]:
    """Give the texts of a string or a list of parts of these types."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} must be a string or a list of parts", param=path)
    return [_part_text(part, f"{path}.{index}", kinds) for index, part in enumerate(content)]


def _part_text(part: object, path: str, kinds: tuple[str, ...]) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{path} must be an object with type and text", param=path)
    kind = part.get("type")
    if kind not in kinds:
        raise InvalidRequest(f"{path}.type is {shown(kind)}; here it can be {', '.join(kinds)}", param=f"{path}.type")
    return _text_field(part, "refusal" if kind == "refusal" else "text", path)


def chat_messages(items: Iterable[Mapping[str, object]], instructions: str | None) -> list[ChatMessage]:
    """Give the chat messages of a conversation.

    Thoughts, text and calls that follow each other are one assistant message, as the model wrote them. Raises
    InvalidRequest when nothing was said, or when an output answers no call.
    """
    builder = _ChatBuilder()
    if instructions:
        builder.messages.append({"role": "system", "content": instructions})
    for item in items:
        builder.add(item)
    if not builder.messages:
        raise InvalidRequest("input is empty; send a string or at least one item", param="input")
    return builder.messages


class _ChatBuilder:
    """Gathers items into messages; the assistant's last message stays open for what belongs to it."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._open: ChatMessage | None = None
        self._call_names: dict[str, str] = {}

    def add(self, item: Mapping[str, object]) -> None:
        match item["type"]:
            case "reasoning":
                self._add_reasoning(item)
            case "function_call":
                self._add_call(item)
            case "function_call_output":
                self._add_output(item)
            case _:
                self._add_message(item)

    def _add_message(self, item: Mapping[str, object]) -> None:
        role, content = item["role"], _parts(item["content"])
        if role != "assistant":
            self._open = None
            self.messages.append({"role": role, "content": content})
            return
        text = "".join(str(part["text"]) for part in content)
        self._assistant_with_room("content", "tool_calls")["content"] = text

    def _add_reasoning(self, item: Mapping[str, object]) -> None:
        parts = _parts(item["content"]) or _parts(item["summary"])
        text = "\n".join(str(part["text"]) for part in parts)
        if text:
            self._assistant_with_room("reasoning", "content", "tool_calls")["reasoning"] = text

    def _add_call(self, item: Mapping[str, object]) -> None:
        call_id, name = str(item["call_id"]), str(item["name"])
        self._call_names[call_id] = name
        message = self._assistant_with_room()
        calls = message.setdefault("tool_calls", [])
        assert isinstance(calls, list), "set here only"
        function = {"name": name, "arguments": item["arguments"]}
        calls.append({"id": call_id, "type": "function", "function": function})

    def _add_output(self, item: Mapping[str, object]) -> None:
        call_id, output = str(item["call_id"]), item["output"]
        name = self._call_names.get(call_id)
        if name is None:
            raise InvalidRequest(
                f"the function_call_output of call_id {call_id[:80]!r} answers no function_call of this conversation; "
                "send the call before it, or previous_response_id",
                param="input",
            )
        self._open = None
        content = output if isinstance(output, str) else _parts(output)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": content})

    def _assistant_with_room(self, *taken: str) -> ChatMessage:
        """Give the open assistant message, or a new one when any of these parts is there already."""
        if self._open is None or any(part in self._open for part in taken):
            self._open = {"role": "assistant"}
            self.messages.append(self._open)
        return self._open


def _parts(content: object) -> list[dict[str, object]]:
    """Give the parts as the chat API writes them: all texts have one type."""
    assert isinstance(content, list), "read_input gives lists of parts"
    return [{"type": "text", "text": part["text"]} for part in content]


def turn_starts(messages: list[ChatMessage]) -> list[int]:
    """Give where a conversation can be cut: the places of the user's messages after the first one."""
    return [index for index, message in enumerate(messages) if message["role"] == "user"][1:]


def without_oldest(messages: list[ChatMessage], start: int) -> list[ChatMessage]:
    """Drop what was said before start; instructions stay."""
    kept = [message for message in messages[:start] if message["role"] in ("system", "developer")]
    return [*kept, *messages[start:]]
