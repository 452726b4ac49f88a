"""Request bodies of the OpenAI-shaped endpoints: fields, types, and how they become sampling parameters.

Only requests are pydantic models; they are checked once per request. Values that need no type but a range are
checked in serve/sampling_params.py, those that need the model in engine/input_processor.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from serve.errors import InvalidRequest
from serve.log import log_once
from serve.sampling_params import MAX_LOGIT_BIAS, OutputKind, SamplingParams

log = logging.getLogger(__name__)

COMPLETION_MAX_TOKENS: Final = 16
# Bounds on how many values are looked at one by one, so that a hostile body costs no more than its decoding.
MAX_TOKEN_IDS: Final = 1 << 20
MAX_MESSAGES: Final = 1 << 16
MAX_OPTIONS: Final = 1024
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

RENAMED: Final = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_decoding_backend": "structured_outputs",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "logits_processors": "vllm_xargs, read by the server's --logits-processors",
    "functions": "tools",
    "function_call": "tool_choice",
}
# Asking for these must not be ignored: each would change the answer. A harmless value is accepted.
UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "structured_outputs": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "thinking_token_budget": (-1,),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "kv_transfer_params": (),
    "audio": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "include_reasoning": (True,),
}
_UNSUPPORTED_RESPONSE_FORMAT: Final = 'response_format is not supported yet; leave it out or send {"type": "text"}'


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not a boolean")
    return value


def _drop_nulls(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _no_bools(values: Any) -> Any:
    if isinstance(values, list) and bool in set(map(type, values)):
        raise ValueError("Input should hold numbers, not booleans")
    return values


class _AtMost:
    """A check of a container's length before its items are looked at."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __call__(self, values: Any) -> Any:
        if isinstance(values, (list, dict)) and len(values) > self._limit:
            raise ValueError(f"must hold at most {self._limit} entries, got {len(values)}")
        return values


Int = Annotated[int, BeforeValidator(_no_bool), Field(ge=INT64_MIN, le=INT64_MAX)]
Float = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=2**31 - 1)]],
    Field(fail_fast=True),
    BeforeValidator(_no_bools),
    BeforeValidator(_AtMost(MAX_TOKEN_IDS)),
]
# One wrong item is enough: each report of pydantic takes microseconds, and a body can hold millions of items.
Strings = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_as_list)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True), BeforeValidator(_AtMost(MAX_MESSAGES))]
Options = Annotated[dict[str, Any], BeforeValidator(_AtMost(MAX_OPTIONS))]
XArgList = Annotated[list[str | int | float], Field(fail_fast=True), BeforeValidator(_AtMost(MAX_OPTIONS))]
XArgs = Annotated[dict[str, str | int | float | XArgList], BeforeValidator(_AtMost(MAX_OPTIONS))]
LogitBias = Annotated[dict[str, Float], BeforeValidator(_AtMost(MAX_LOGIT_BIAS))]


class StreamOptions(BaseModel):
    """What a stream reports besides text."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """The fields that chat and completions share. Absent and null mean the same: the default."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, BeforeValidator(_drop_nulls)] = None
    n: Int = 1
    max_tokens: Int | None = None
    min_tokens: Int = 0
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    presence_penalty: Float = 0.0
    frequency_penalty: Float = 0.0
    repetition_penalty: Float | None = None
    seed: Int | None = None
    stop: Strings = []
    stop_token_ids: TokenIds = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: LogitBias | None = None
    prompt_logprobs: Int | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] = []
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    echo: bool = False
    priority: Int = 0
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    request_id: str | None = None
    user: Any = None
    vllm_xargs: XArgs | None = None

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "modalities", "prediction"}
    )

    def wants_usage(self, *, is_forced: bool) -> tuple[bool, bool]:
        """Tell whether a stream ends with usage, and whether every chunk carries it."""
        if is_forced:
            return True, True
        options = self.stream_options
        if options is None or not options.include_usage:
            return False, False
        return True, options.continuous_usage_stats

    def sampling_params(
        self, defaults: Mapping[str, float], *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """Give the sampling parameters; a value that the request leaves out comes from defaults, then from the API."""
        return SamplingParams(
            n=self.n,
            temperature=_first(self.temperature, defaults.get("temperature"), 1.0),
            top_p=_first(self.top_p, defaults.get("top_p"), 1.0),
            top_k=int(_first(self.top_k, defaults.get("top_k"), 0)),
            min_p=_first(self.min_p, defaults.get("min_p"), 0.0),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=_first(self.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=self._logit_bias(),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            output_kind=OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY,
            extra_args=self.vllm_xargs,
        )

    def _logit_bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        bias = {}
        for key, value in self.logit_bias.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise InvalidRequest(f"logit_bias keys must be token ids, got {key[:40]!r}", param="logit_bias")
            bias[int(key)] = value
        return bias

    def check(self) -> None:
        """Check what involves several fields. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs not in (None, 0):
            raise InvalidRequest("prompt_logprobs cannot be streamed; send stream: false", param="prompt_logprobs")
        if self.truncate_prompt_tokens is not None and (
            self.truncate_prompt_tokens < -1 or self.truncate_prompt_tokens == 0
        ):
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or at least 1, got {self.truncate_prompt_tokens}",
                param="truncate_prompt_tokens",
            )
        best_of = (self.model_extra or {}).get("best_of")
        if best_of not in (None, 1, self.n):
            raise InvalidRequest("best_of is not supported; use n", param="best_of")
        self._check_extra()

    def _check_extra(self) -> None:
        """Refuse fields that were renamed or would change the answer; note the unknown rest once."""
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name in RENAMED:
                raise InvalidRequest(f"{name} is not supported; use {RENAMED[name]}", param=name)
            if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
                raise InvalidRequest(f"{name} is not supported by this server yet; leave it out", param=name)
        modalities = extra.get("modalities")
        if modalities is not None and modalities != ["text"]:
            raise InvalidRequest('modalities must be ["text"]; this server answers with text only', param="modalities")
        response_format = extra.get("response_format")
        if response_format is not None and not (
            isinstance(response_format, dict) and response_format.get("type") == "text"
        ):
            raise InvalidRequest(_UNSUPPORTED_RESPONSE_FORMAT, param="response_format")
        for name in extra.keys() - self.IGNORED - UNSUPPORTED.keys():
            log_once(log, logging.DEBUG, f"unknown request field ignored: {name[:64]}")


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Objects = Field(min_length=1)
    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Options | None = None
    documents: Objects | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: Annotated[Objects, BeforeValidator(_AtMost(MAX_OPTIONS))] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True

    @property
    def max_output_tokens(self) -> int | None:
        """The limit that counts: the new name wins over the old one."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def num_logprobs(self) -> int | None:
        """Give the number of candidates per token, or None when logprobs are off."""
        return self.top_logprobs if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt: false", param="continue_final_message"
            )
        _check_tools(self.tools, self.tool_choice)


def _check_tools(tools: list[dict[str, Any]] | None, tool_choice: Any) -> None:
    if tools is None:
        if tool_choice not in (None, "none"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return
    if not tools:
        raise InvalidRequest("tools must not be an empty list; leave it out", param="tools")
    if tool_choice is None:
        raise InvalidRequest(
            'tools need a tool parser, which this server does not have yet; send tool_choice: "none" to show the '
            "tools to the model without parsing calls",
            param="tools",
        )
    if tool_choice != "none":
        raise InvalidRequest(
            'tool_choice must be "none": calling tools is not supported by this server yet', param="tool_choice"
        )


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions. prompt is taken apart in completions.py: its four forms need exact messages."""

    prompt: Any
    logprobs: Int | None = None
    add_special_tokens: bool = True
    suffix: str | None = None

    @property
    def max_output_tokens(self) -> int | None:
        """The limit as sent; 0 is a number here: with echo it means to score the prompt only."""
        return self.max_tokens

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise InvalidRequest("suffix is not supported: this model does not fill in the middle", param="suffix")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1, or 0 together with echo: true", param="max_tokens")


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize: prompt or messages."""

    model_config = ConfigDict(extra="ignore")
    model: str = ""
    prompt: str | None = None
    messages: Annotated[Objects, Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Options | None = None
    tools: Annotated[Objects, BeforeValidator(_AtMost(MAX_OPTIONS))] | None = None

    def check(self) -> None:
        """Check what involves several fields. Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt: false", param="continue_final_message"
            )


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="ignore")
    model: str = ""
    tokens: TokenIds

    def check(self) -> None:
        """Nothing here involves several fields."""


RequestT = TypeVar("RequestT", ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def parse_request(kind: type[RequestT], body: Mapping[str, Any]) -> RequestT:
    """Check a decoded body. Raises InvalidRequest that names the first field at fault."""
    try:
        request = kind.model_validate(_drop_nulls(dict(body)))
    except ValidationError as error:
        raise _invalid(error) from None
    request.check()
    return request


def _invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    # Union members and tagged parts add words of ours to the path; a client only knows its own keys and indices.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    param = ".".join(path) or None
    text = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {text}" if param else text, param=param)


def _first(value: float | None, default: float | None, last: float) -> float:
    if value is not None:
        return value
    return default if default is not None and math.isfinite(default) else last
