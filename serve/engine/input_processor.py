"""Phase 2 of 11: the last gate before the wire, request x model -> EngineCoreRequest or InvalidRequest.

What passes here is complete and consistent: every token id is in the vocabulary, the prompt leaves room for at least
one token, end ids are merged, bad words are tokenized. The engine core trusts it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from serve.checkpoint import Checkpoint, read_generation_config, sampling_defaults
from serve.config import ModelConfig
from serve.errors import InvalidRequest
from serve.renderers.tokenizer import Tokenizer
from serve.sampling_params import MAX_BAD_WORDS, SamplingParams, normalize
from serve.wire.frontend import EngineCoreRequest

MAX_SALT_CHARS: Final = 128
MAX_BAD_WORD_CHARS: Final = 16384  # of all bad words of a request
_INT64_MAX: Final = 2**63 - 1


@dataclass(slots=True)
class RequestOptions:
    """What a request carries besides prompt and sampling. arrival_time is wall-clock seconds."""

    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = field(default_factory=time.time)


def default_sampling(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, float]:
    """Give the sampling values used where a request sets none.

    They come from the model's generation config (or the folder named instead of it), then from
    --override-generation-config. Raises ConfigError when the folder's file cannot be used.
    """
    match config.generation_config:
        case "auto":
            values = dict(checkpoint.generation_defaults)
        case "vllm":
            values = {}
        case folder:
            values = sampling_defaults(read_generation_config(folder, required=True))
    values.update(config.override_generation_config)
    return values


class InputProcessor:
    """Builds engine requests for one model. max_model_len is the engine's resolved limit in tokens."""

    def __init__(
        self, tokenizer: Tokenizer, *, checkpoint: Checkpoint, config: ModelConfig, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = checkpoint.arch.vocab_size
        self._max_model_len = max_model_len
        self._max_logprobs = config.max_logprobs
        self._max_tokens_cap = self._server_max_tokens(checkpoint, config)
        eos = tokenizer.eos_token_id
        if eos is None and checkpoint.eos_token_ids:
            eos = checkpoint.eos_token_ids[0]
        self._eos_token_id = eos
        self._secondary_eos = tuple(token_id for token_id in checkpoint.eos_token_ids if token_id != eos)

    def process(
        self, prompt_token_ids: list[int], params: SamplingParams, *, request_id: str, options: RequestOptions
    ) -> EngineCoreRequest:
        """Check a request against the model and give it in the form the engine takes. Raises InvalidRequest.

        request_id is the client's; the engine's own id gets a random suffix, which makes equal client ids harmless.
        """
        self._check_prompt(prompt_token_ids)
        _check_options(options)
        params = normalize(self._with_max_tokens(params, len(prompt_token_ids)))
        self._check_vocabulary(params)
        self._check_logprobs(params)
        return EngineCoreRequest(
            request_id=internal_id(request_id),
            prompt_token_ids=prompt_token_ids,
            sampling_params=self._with_model_values(params),
            arrival_time=options.arrival_time,
            cache_salt=options.cache_salt,
            priority=options.priority,
            external_req_id=request_id,
        )

    @staticmethod
    def _server_max_tokens(checkpoint: Checkpoint, config: ModelConfig) -> int | None:
        """The server's own limit on output: set by an override or a chosen folder, not by the model's file."""
        if config.generation_config == "auto":
            limit = config.override_generation_config.get("max_new_tokens")
        else:
            limit = default_sampling(checkpoint, config).get("max_new_tokens")
        return None if limit is None else int(limit)

    def _check_prompt(self, token_ids: list[int]) -> None:
        limit = self._max_model_len
        if not token_ids:
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        if len(token_ids) >= limit:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens and the model's context is {limit} tokens, which must also "
                f"hold at least one output token; shorten the prompt to at most {limit - 1} tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        self._check_ids(token_ids, "prompt")

    def _check_ids(self, token_ids: Iterable[int], param: str) -> None:
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        wrong = lowest if lowest < 0 else highest
        if not 0 <= wrong < self._vocab_size:
            raise InvalidRequest(
                f"{param} holds token id {wrong}, which is outside the vocabulary; ids are 0 to {self._vocab_size - 1}",
                param=param,
            )

    def _check_vocabulary(self, params: SamplingParams) -> None:
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        self._check_ids(params.logit_bias or (), "logit_bias")

    def _check_logprobs(self, params: SamplingParams) -> None:
        limit = self._vocab_size if self._max_logprobs == -1 else self._max_logprobs
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is None:
                continue
            wanted = self._vocab_size if count == -1 else count
            if wanted > limit:
                raise InvalidRequest(
                    f"{name}={count} asks for {wanted} logprobs a token, the limit is {limit}; "
                    "lower it or start the server with a larger --max-logprobs",
                    param=name,
                )

    def _with_max_tokens(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """Cut max_tokens to the room after the prompt and to the server's own limit."""
        limit = min(params.max_tokens, self._max_model_len - prompt_len)
        if self._max_tokens_cap is not None:
            limit = min(limit, self._max_tokens_cap)
        return msgspec.structs.replace(params, max_tokens=limit) if limit != params.max_tokens else params

    def _with_model_values(self, params: SamplingParams) -> SamplingParams:
        stop_ids = params.stop_token_ids
        if not params.ignore_eos:
            stop_ids = (*stop_ids, *self._secondary_eos)
        eos = () if self._eos_token_id is None else (self._eos_token_id,)
        complete = msgspec.structs.replace(
            params,
            stop_token_ids=tuple(dict.fromkeys(stop_ids)),
            eos_token_id=None if params.ignore_eos else self._eos_token_id,
            all_stop_token_ids=tuple(sorted({*stop_ids, *self._secondary_eos, *eos})),
            bad_words_token_ids=self._tokenize_bad_words(params.bad_words),
        )
        _check_allowed(complete)
        return complete

    def _tokenize_bad_words(self, bad_words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Give the sequences to forbid: each word as it starts a text and, where that differs, after a space."""
        if sum(len(word) for word in bad_words) > MAX_BAD_WORD_CHARS or len(bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words must hold at most {MAX_BAD_WORDS} strings and {MAX_BAD_WORD_CHARS} characters in total",
                param="bad_words",
            )
        sequences: list[tuple[int, ...]] = []
        for word in bad_words:
            bare = self._tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self._tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not bare:
                raise InvalidRequest(f"bad_words entry {word!r} has no tokens", param="bad_words")
            sequences.append(tuple(bare))
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                sequences.append(tuple(spaced))
        return tuple(sequences)


def internal_id(external_id: str) -> str:
    """Give a fresh engine id for a client's id."""
    return f"{external_id}-{uuid.uuid4().hex}"


def _check_allowed(params: SamplingParams) -> None:
    """Refuse a request whose allowed tokens are all forbidden again: no first token could be sampled."""
    if params.allowed_token_ids is None:
        return
    forbidden = {words[0] for words in params.bad_words_token_ids if len(words) == 1}
    if params.min_tokens > 0:
        forbidden.update(params.all_stop_token_ids)
    if forbidden.issuperset(params.allowed_token_ids):
        raise InvalidRequest(
            f"allowed_token_ids holds only tokens that bad_words or min_tokens={params.min_tokens} forbid; "
            "allow others or drop those",
            param="allowed_token_ids",
        )


def _check_options(options: RequestOptions) -> None:
    if not -_INT64_MAX <= options.priority <= _INT64_MAX:
        raise InvalidRequest(f"priority must fit in 64 bits, got {options.priority}", param="priority")
    salt = options.cache_salt
    if salt is not None and not (0 < len(salt) <= MAX_SALT_CHARS and salt.isprintable()):
        raise InvalidRequest(
            f"cache_salt must be 1 to {MAX_SALT_CHARS} visible characters, got {len(salt)} characters",
            param="cache_salt",
        )
