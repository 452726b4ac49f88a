"""Body of POST /v1/responses: its fields, their defaults, and the chat request that answers it.

The Responses API differs from chat in the names of its fields and in the shape of its items, not in what a model is
asked: everything that the two share is checked by the chat request's own types.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve.entrypoints.openai.fields import MAX_OPTIONS, AtMost, Int, Objects, Options, drop_nulls
from serve.entrypoints.openai.protocol import RENAMED, ChatCompletionRequest, parse_request
from serve.errors import InvalidRequest
from serve.log import log_once

log = logging.getLogger(__name__)

LOGPROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
MAX_INCLUDE: Final = 64
MAX_METADATA: Final = 16
MAX_PAGE: Final = 100
DEFAULT_PAGE: Final = 20
# Names of the chat API that would be dropped without a word here, and where they went.
MOVED: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": f'include: ["{LOGPROBS}"]',
    "functions": "tools",
    "function_call": "tool_choice",
}
# Asking for these must not be ignored: each would change the answer.
UNSUPPORTED: Final = {
    "prompt": "stored prompt templates are not kept by this server; send instructions and input",
    "conversation": "conversations are not kept by this server; use previous_response_id",
    "context_management": "this server does not compact conversations; use truncation",
    "moderation": "this server has no moderation model",
    "n": "a response has one answer; send the request again for another",
}
# What chat takes beyond OpenAI's own parameters; these go on as they are.
PASSED: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "add_special_tokens",
    "return_tokens_as_token_ids",
    "thinking_token_budget",
    "include_reasoning",
    "structured_outputs",
    "repetition_detection",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
    "request_id",
    "vllm_xargs",
)
IGNORED: Final = frozenset(
    {
        "stream_options",
        "service_tier",
        "prompt_cache_retention",
        "prompt_cache_options",
        "background_options",
        "access_programs",
    }
)
_PARAM_WORDS: Final = (
    (re.compile(r"^messages\b"), "input"),
    (re.compile(r"^max_(?:completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^(tools\.\d+)\.function\b"), r"\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
)
_TEXT_WORDS: Final = (
    (re.compile(r"\bmax_(?:completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format(?:\.json_schema)?\b"), "text.format"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\b(tools\.\d+)\.function\b"), r"\1"),
    (re.compile(r"\bset truncate_prompt_tokens\b"), "send truncation: auto"),
)


class TextFormat(BaseModel):
    """What the answer's text must be; name, schema, strict and description belong to json_schema."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, object] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: str | None = None

    def response_format(self) -> dict[str, object]:
        """Give the chat API's form, where the schema's parts are one level deeper."""
        if self.type != "json_schema":
            return {"type": self.type}
        for field, value in (("name", self.name), ("schema", self.schema_)):
            if value is None:
                raise InvalidRequest(f"text.format.{field} is missing; json_schema needs it", param="text.format")
        parts = {"name": self.name, "schema": self.schema_, "strict": self.strict, "description": self.description}
        return {"type": "json_schema", "json_schema": {key: part for key, part in parts.items() if part is not None}}


class TextConfig(BaseModel):
    """The form of the answer. verbosity is accepted: no model here has such a switch."""

    model_config = ConfigDict(extra="ignore")
    format: Annotated[TextFormat | None, BeforeValidator(drop_nulls)] = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(BaseModel):
    """How hard to think. summary is accepted: the thoughts themselves are in the answer."""

    model_config = ConfigDict(extra="ignore")
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(BaseModel):
    """Body of POST /v1/responses. input is taken apart in responses_input.py: its forms need exact messages."""

    model_config = ConfigDict(extra="allow")

    input: object
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    tools: Annotated[Objects, BeforeValidator(AtMost(MAX_OPTIONS))] = []
    tool_choice: object = None
    parallel_tool_calls: bool = True
    max_tool_calls: Int | None = None
    text: Annotated[TextConfig | None, BeforeValidator(drop_nulls)] = None
    reasoning: Annotated[ReasoningConfig | None, BeforeValidator(drop_nulls)] = None
    truncation: Literal["auto", "disabled"] = "disabled"
    include: Annotated[list[str], Field(fail_fast=True), BeforeValidator(AtMost(MAX_INCLUDE))] = []
    top_logprobs: Int = 0
    stream: bool = False
    store: bool = True
    background: bool = False
    metadata: Annotated[dict[str, str], BeforeValidator(AtMost(MAX_METADATA))] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: Options | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Tell whether the text comes with the values of its tokens."""
        return self.top_logprobs != 0 or LOGPROBS in self.include

    def check(self) -> None:
        """Check what involves several fields. Raises InvalidRequest."""
        if self.background and not self.store:
            raise InvalidRequest("background needs store: true, or nobody could read the answer", param="background")
        for index, name in enumerate(self.include):
            if name not in INCLUDABLE:
                raise InvalidRequest(
                    f"include.{index} is {name[:80]!r}; what can be included is {', '.join(INCLUDABLE)}",
                    param=f"include.{index}",
                )
        for name in self.model_extra or {}:
            if name in MOVED:
                raise InvalidRequest(f"{name} is a field of the chat API; here it is {MOVED[name]}", param=name)
            if name in UNSUPPORTED:
                raise InvalidRequest(f"{name} is not supported: {UNSUPPORTED[name]}", param=name)
            if name not in PASSED and name not in IGNORED and name not in RENAMED:
                log_once(log, logging.DEBUG, f"unknown request field ignored: {name[:64]}")

    def chat_request(self, messages: Sequence[Mapping[str, object]]) -> ChatCompletionRequest:
        """Give the chat request over these messages. Raises InvalidRequest in the words of this API."""
        extra = self.model_extra or {}
        body: dict[str, object] = {name: extra[name] for name in extra if name in PASSED or name in RENAMED}
        tools, choice = _chat_tools(self.tools, self.tool_choice)
        body |= {
            "messages": list(messages),
            "model": self.model,
            "max_completion_tokens": self.max_output_tokens,
            "stream": self.stream or self.background,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": tools or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        if self.text is not None and self.text.format is not None:
            body["response_format"] = self.text.format.response_format()
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.effort
        with own_words():
            return parse_request(ChatCompletionRequest, body)


@contextmanager
def own_words() -> Iterator[None]:
    """Word refusals of the chat request with the names that a client of this API used."""
    try:
        yield
    except InvalidRequest as error:
        param, text = error.param, str(error)
        for pattern, name in _PARAM_WORDS:
            param = None if param is None else pattern.sub(name, param)
        for pattern, name in _TEXT_WORDS:
            text = pattern.sub(name, text)
        raise InvalidRequest(text, param=param, code=error.code) from None


def _chat_tools(tools: list[dict[str, object]], choice: object) -> tuple[list[dict[str, object]], object]:
    """Give the tools and the choice in the chat API's form; tools that the choice rules out are left out."""
    nested = [_chat_tool(tool, f"tools.{index}") for index, tool in enumerate(tools)]
    if isinstance(choice, str) or choice is None:
        return nested, None if choice == "auto" or (choice == "none" and not nested) else choice
    if not isinstance(choice, dict):
        raise _bad_choice("must be a word or an object")
    kind = choice.get("type")
    if kind == "function":
        return nested, {"type": "function", "function": {"name": _name(choice.get("name"), "tool_choice.name")}}
    if kind == "allowed_tools":
        return _allowed_tools(nested, choice)
    raise _bad_choice(f"type is {str(kind)[:80]!r}; the types are function, allowed_tools")


def _chat_tool(tool: dict[str, object], path: str) -> dict[str, object]:
    kind = tool.get("type")
    if kind != "function":
        raise InvalidRequest(
            f"{path}.type is {str(kind)[:80]!r}; this server runs no built-in tools, it takes: function",
            param=f"{path}.type",
        )
    parts = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": _name(tool.get("name"), f"{path}.name"), **parts}}


def _allowed_tools(
    nested: list[dict[str, object]], choice: dict[str, object]
) -> tuple[list[dict[str, object]], object]:
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise _bad_choice("mode must be auto or required")
    if not isinstance(allowed, list) or not allowed:
        raise _bad_choice("tools must be a list of the allowed tools")
    names = set()
    for index, tool in enumerate(allowed):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise _bad_choice(f"tools.{index} must be an object of type function")
        names.add(_name(tool.get("name"), f"tool_choice.tools.{index}.name"))
    kept = [tool for tool in nested if tool_name(tool) in names]
    unknown = sorted(names - {tool_name(tool) for tool in nested})
    if unknown:
        raise _bad_choice(f"names {unknown[0][:80]!r}, which is not in tools")
    return kept, None if mode == "auto" else "required"


def tool_name(tool: Mapping[str, object]) -> str:
    """Give the name of a tool in the chat API's form."""
    function = tool["function"]
    assert isinstance(function, dict), "made by _chat_tool"
    return str(function["name"])


def _name(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path} must be the name of a function", param=path)
    return value


def _bad_choice(problem: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice {problem}", param="tool_choice")
