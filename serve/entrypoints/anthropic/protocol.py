"""Request bodies of the Messages API: their fields and types; the blocks of messages are read in conversion.py.

Bounds and sampling ranges are the chat API's: conversion.py makes a chat request of a body, which is checked again.
"""

from __future__ import annotations

import logging
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve.entrypoints.openai.fields import AtMost, Float, Int, Objects, Options, drop_nulls
from serve.entrypoints.openai.protocol import RENAMED
from serve.errors import InvalidRequest
from serve.log import log_once

log = logging.getLogger(__name__)

MAX_TOOLS: Final = 1024
# Fields of the chat API that are taken under the same name.
CHAT_FIELDS: Final = (
    "cache_salt",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "request_id",
    "seed",
    "stop_token_ids",
    "structured_outputs",
    "vllm_xargs",
)
_TAKEN: Final = frozenset(CHAT_FIELDS) | RENAMED.keys()
# Asking for these must not be ignored: each would change the answer.
_UNSUPPORTED: Final = ("mcp_servers", "container")


def _text_or_blocks(value: object) -> object:
    """Check what pydantic would report once for each of the two forms."""
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise ValueError("must be a string or a list of text blocks")
    return value


class Thinking(BaseModel):
    """Whether the model thinks before it answers, for how many tokens at most, and whether its thoughts are shown."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(BaseModel):
    """Whether tools may or must be called."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Tool(BaseModel):
    """One function that the model may call; tools that Anthropic runs itself have another type and are refused."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, object]
    strict: bool | None = None


class OutputFormat(BaseModel):
    """The schema that the text of the answer obeys."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["json_schema"]
    json_schema: dict[str, object] = Field(alias="schema")


class OutputConfig(BaseModel):
    """The form of the answer, and how much the model thinks about it."""

    model_config = ConfigDict(extra="ignore")
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[OutputFormat | None, BeforeValidator(drop_nulls)] = None


Tools = Annotated[
    list[Annotated[Tool, BeforeValidator(drop_nulls)]], Field(fail_fast=True), BeforeValidator(AtMost(MAX_TOOLS))
]


class PromptRequest(BaseModel):
    """Body of POST /v1/messages/count_tokens: what makes the prompt. Absent and null mean the same: the default."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[Objects, Field(min_length=1)]
    system: Annotated[str | list[dict[str, object]] | None, BeforeValidator(_text_or_blocks)] = None
    tools: Tools | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(drop_nulls)] = None
    thinking: Annotated[Thinking | None, BeforeValidator(drop_nulls)] = None
    output_config: Annotated[OutputConfig | None, BeforeValidator(drop_nulls)] = None
    output_format: Annotated[OutputFormat | None, BeforeValidator(drop_nulls)] = None
    chat_template_kwargs: Options | None = None

    @property
    def schema_of_text(self) -> dict[str, object] | None:
        """The schema of the answer's text, under its new or its old name, or None."""
        new = self.output_config.format if self.output_config is not None else None
        chosen = new or self.output_format
        return chosen.json_schema if chosen is not None else None

    @property
    def hides_thoughts(self) -> bool:
        """True when thoughts are to be reported without their text."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def check(self) -> None:
        """Check what involves several fields. Raises InvalidRequest."""
        for name in _UNSUPPORTED:
            if (self.model_extra or {}).get(name):
                raise InvalidRequest(f"{name} is not supported by this server; leave it out", param=name)
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return
        if not self.tools:
            raise InvalidRequest(f'tool_choice of type "{choice.type}" needs tools', param="tool_choice")
        names = [tool.name for tool in self.tools]
        if choice.type == "tool" and choice.name not in names:
            raise InvalidRequest(
                f"tool_choice.name is {choice.name!r}; the tools are: {', '.join(names)}", param="tool_choice.name"
            )


class MessagesRequest(PromptRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[Int, Field(ge=1)]
    stream: bool = False
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] = []
    temperature: Annotated[Float, Field(ge=0, le=2)] | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    metadata: dict[str, object] | None = None

    def chat_fields(self) -> dict[str, object]:
        """Give the fields that the chat API knows, or refuses, under the same name."""
        extra = self.model_extra or {}
        for name in extra:
            if name not in _TAKEN:
                log_once(log, logging.DEBUG, f"unknown request field ignored: {name[:64]}")
        return {name: value for name, value in extra.items() if name in _TAKEN}
