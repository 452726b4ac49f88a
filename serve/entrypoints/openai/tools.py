"""Phase 1 of 11: the tools of a chat request: what is wrong with them, and what the model may do with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeGuard

from serve.entrypoints.asgi import JsonObject
from serve.errors import InvalidRequest, shown
from serve.limits import RequestLimits, check_count

ToolMode = Literal["none", "auto", "required", "named"]

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CHOICES: Final = '"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call; parameters is the JSON schema of its arguments, {} for none."""

    name: str
    parameters: JsonObject = field(default_factory=dict)
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request lets the model do: mode none looks for no calls; name is set for named; max_calls None = any."""

    mode: ToolMode = "none"
    tools: tuple[Tool, ...] = ()
    name: str | None = None
    max_calls: int | None = None

    @property
    def forced(self) -> Literal["required", "named"] | None:
        """How calls are forced by the grammar, if they are."""
        return self.mode if self.mode in ("required", "named") else None

    def schemas(self) -> Mapping[str, JsonObject]:
        """Give the parameters by tool name; empty when no calls are looked for."""
        return {} if self.mode == "none" else {tool.name: tool.parameters for tool in self.tools}


NO_TOOLS: Final = ToolUse()


def check_tools(tools: Sequence[JsonObject] | None, tool_choice: object) -> None:
    """Check what needs no server: the list, the names, the choice. Raises InvalidRequest naming the field."""
    if tools is None:
        if tool_choice not in (None, "none"):
            raise InvalidRequest("tool_choice needs tools; send tools or leave it out", param="tool_choice")
        return
    if not tools:
        raise InvalidRequest("tools must not be an empty list; leave it out", param="tools")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name = _read_tool(tool, f"tools.{i}").name
        if name in names:
            raise InvalidRequest(f"tools.{i}.function.name {name!r} is there twice; names are unique", param="tools")
        names.add(name)
    _, chosen = _read_choice(tool_choice)
    if chosen is not None and chosen not in names:
        raise InvalidRequest(
            f"tool_choice names {chosen[:64]!r}, which is not among the tools: {', '.join(sorted(names)[:8])}",
            param="tool_choice",
        )


def plan_tools(
    tools: Sequence[JsonObject] | None,
    tool_choice: object,
    *,
    parallel: bool,
    can_parse: bool,
    limits: RequestLimits,
) -> ToolUse:
    """Give what the model may do with checked tools; can_parse says that calls in free text can be read.

    Raises InvalidRequest for auto on a server that cannot read calls.
    """
    if tools is None:
        return NO_TOOLS
    check_count(tools, limits.max_tools, param="tools", what="tools", flag_name="--max-tools")
    mode, name = _read_choice(tool_choice)
    if mode == "auto" and not can_parse:
        raise InvalidRequest(
            'tool_choice "auto" needs a parser for the calls of this model and none is known; start the server with '
            '--tool-call-parser NAME, or send tool_choice "required", a named tool or "none"',
            param="tool_choice" if tool_choice is not None else "tools",
        )
    read = tuple(_read_tool(tool, f"tools.{i}") for i, tool in enumerate(tools))
    if mode == "named":
        read = tuple(tool for tool in read if tool.name == name)
    return ToolUse(mode, read, name, None if parallel and mode != "named" else 1)


def _read_choice(tool_choice: object) -> tuple[ToolMode, str | None]:
    """Give the mode and, for named, the tool's name; tools without a choice mean auto."""
    match tool_choice:
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required":
            return "required", None
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", name
        case _:
            raise InvalidRequest(f"tool_choice must be {_CHOICES}", param="tool_choice")


def _read_tool(tool: JsonObject, path: str) -> Tool:
    kind, function = tool.get("type", "function"), tool.get("function")
    if kind != "function":
        raise InvalidRequest(f'{path}.type is {shown(kind)}; the only type is "function"', param=f"{path}.type")
    if not is_object(function):
        raise InvalidRequest(f"{path}.function must be an object with a name", param=f"{path}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.function.name must be 1 to 64 letters, digits, _ or -", param=f"{path}.function.name"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{path}.function.description must be a string", param=f"{path}.function.description")
    parameters = function.get("parameters")
    if parameters is not None and not is_object(parameters):
        raise InvalidRequest(
            f"{path}.function.parameters must be a JSON schema, an object", param=f"{path}.function.parameters"
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{path}.function.strict must be true or false", param=f"{path}.function.strict")
    return Tool(name, parameters or {}, strict)


def is_object(value: object) -> TypeGuard[JsonObject]:
    """Tell whether a decoded JSON value is an object."""
    return isinstance(value, dict)
