"""Request bodies of the OpenAI-shaped endpoints: fields, types, and how they become sampling parameters.

Only requests are pydantic models; they are checked once per request. Values that need no type but a range are
checked in serve/sampling_params.py, those that need the model in engine/input_processor.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from serve.entrypoints.openai.fields import (
    MAX_OPTIONS,
    AtMost,
    Float,
    Int,
    LogitBias,
    Objects,
    Options,
    RepetitionDetectionBody,
    ResponseFormat,
    StreamOptions,
    Strings,
    StructuredOutputsBody,
    TokenIds,
    XArgs,
    drop_nulls,
)
from serve.entrypoints.openai.tools import check_tools
from serve.errors import InvalidRequest
from serve.log import log_once
from serve.sampling_params import OutputKind, RepetitionDetection, SamplingParams

log = logging.getLogger(__name__)

COMPLETION_MAX_TOKENS: Final = 16
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
    "kv_transfer_params": (),
    "audio": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}

# What a search by likelihood has no place for.
BEAM_UNUSABLE: Final = (
    *("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "logit_bias"),
    *("allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "logprob_token_ids", "repetition_detection"),
    *("structured_outputs", "response_format", "tools", "vllm_xargs", "stream"),
)


class GenerationRequest(BaseModel):
    """The fields that chat and completions share. Absent and null mean the same: the default."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, BeforeValidator(drop_nulls)] = None
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
    response_format: Annotated[ResponseFormat | None, BeforeValidator(drop_nulls)] = None
    structured_outputs: Annotated[StructuredOutputsBody | None, BeforeValidator(drop_nulls)] = None
    logprob_token_ids: TokenIds | None = None
    repetition_detection: Annotated[RepetitionDetectionBody | None, BeforeValidator(drop_nulls)] = None
    use_beam_search: bool = False
    length_penalty: Float = 1.0
    return_prompt_text: bool = False

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
            logprob_token_ids=tuple(self.logprob_token_ids) if self.logprob_token_ids else None,
            repetition_detection=self._repetition_detection(),
        )

    def _repetition_detection(self) -> RepetitionDetection | None:
        sent = self.repetition_detection
        if sent is None:
            return None
        return RepetitionDetection(sent.min_pattern_size, sent.max_pattern_size, sent.min_count)

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
        self._check_beam_search()
        best_of = (self.model_extra or {}).get("best_of")
        if best_of not in (None, 1, self.n):
            raise InvalidRequest("best_of is not supported; use n", param="best_of")
        self._check_extra()

    def _check_beam_search(self) -> None:
        if not self.use_beam_search:
            if self.length_penalty != 1.0:
                raise InvalidRequest("length_penalty needs use_beam_search: true", param="length_penalty")
            return
        for name, value in self.model_dump(include=self.model_fields_set & set(BEAM_UNUSABLE)).items():
            is_free_text = name == "response_format" and value is not None and value["type"] == "text"
            if value not in (None, [], {}, type(self).model_fields[name].default) and not is_free_text:
                raise InvalidRequest(f"{name} is not possible with use_beam_search; leave one of them out", param=name)

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
    include_reasoning: bool = True
    thinking_token_budget: Annotated[Int, Field(ge=-1)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: Annotated[Objects, BeforeValidator(AtMost(MAX_OPTIONS))] | None = None
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
        check_tools(self.tools, self.tool_choice)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions. prompt is taken apart in completions.py: its four forms need exact messages.

    prompt_embeds is one embedded prompt or a list of them, see engine/prompt_embeds.py; they come before prompt's.
    """

    prompt: Any = None
    prompt_embeds: Any = None
    logprobs: Int | None = None
    add_special_tokens: bool = True
    suffix: str | None = None

    @property
    def max_output_tokens(self) -> int | None:
        """The limit as sent; 0 is a number here: with echo it means to score the prompt only."""
        return self.max_tokens

    def check(self) -> None:
        super().check()
        if self.prompt is None and self.prompt_embeds is None:
            raise InvalidRequest("prompt is missing; send a text or token ids", param="prompt")
        if self.prompt_embeds is not None:
            self._check_with_embeds()
        if self.use_beam_search and self.logprobs is not None:
            raise InvalidRequest(
                "logprobs is not possible with use_beam_search; leave one of them out", param="logprobs"
            )
        if self.suffix:
            raise InvalidRequest("suffix is not supported: this model does not fill in the middle", param="suffix")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1, or 0 together with echo: true", param="max_tokens")

    def _check_with_embeds(self) -> None:
        """Refuse what needs the ids or the text of a prompt."""
        for name, is_asked in (
            ("echo", self.echo),
            ("use_beam_search", self.use_beam_search),
            ("truncate_prompt_tokens", self.truncate_prompt_tokens is not None),
            ("prompt_logprobs", self.prompt_logprobs is not None),
        ):
            if is_asked:
                raise InvalidRequest(
                    f"{name} is not possible with prompt_embeds, which have neither text nor token ids", param=name
                )


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
    tools: Annotated[Objects, BeforeValidator(AtMost(MAX_OPTIONS))] | None = None

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


class GenerateRequest(BaseModel):
    """Body of POST /inference/v1/generate; sampling_params holds what a completion request would hold beside prompt."""

    model_config = ConfigDict(extra="ignore")
    token_ids: TokenIds = Field(min_length=1)
    sampling_params: Options = {}
    model: str = ""
    request_id: str | None = None
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, BeforeValidator(drop_nulls)] = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Int = 0

    def check(self) -> None:
        """Nothing here involves several fields."""


class RequestBody(Protocol):
    """What parse_request needs of a body: pydantic's own check, then ours."""

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Give the checked body. Raises pydantic's ValidationError."""

    def check(self) -> None:
        """Check what involves several fields. Raises InvalidRequest."""


RequestT = TypeVar("RequestT", bound=RequestBody)


def parse_request(kind: type[RequestT], body: Mapping[str, Any]) -> RequestT:
    """Check a decoded body. Raises InvalidRequest that names the first field at fault."""
    try:
        request = kind.model_validate(drop_nulls(dict(body)))
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
