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
import numpy as np

from serve.checkpoint import Checkpoint, PoolerConfig, read_generation_config, sampling_defaults
from serve.config import ModelConfig
from serve.errors import InvalidRequest
from serve.limits import RequestLimits
from serve.pooling_params import PoolingParams
from serve.renderers.tokenizer import Tokenizer
from serve.sampling_params import DEFAULT_LIMITS, OutputKind, SamplingParams, normalize
from serve.wire.frontend import EngineCoreRequest

MAX_SALT_CHARS: Final = 128
_INT64_MAX: Final = 2**63 - 1


@dataclass(slots=True)
class RequestOptions:
    """What a request carries besides prompt and sampling. arrival_time is wall-clock seconds.

    prompt_embeds, float32 [num_prompt_tokens, hidden_size], is the prompt itself; the prompt's ids are then all 0.
    """

    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = field(default_factory=time.time)
    prompt_embeds: np.ndarray | None = None


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
        self,
        tokenizer: Tokenizer,
        *,
        checkpoint: Checkpoint,
        config: ModelConfig,
        max_model_len: int,
        limits: RequestLimits = DEFAULT_LIMITS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = checkpoint.arch.vocab_size
        self._hidden_size = checkpoint.arch.hidden_size
        self._takes_embeds = config.enable_prompt_embeds
        self._pooler = checkpoint.pooling
        encoder = checkpoint.arch.encoder
        self._has_token_types = encoder is not None and encoder.num_token_types > 1
        self._max_model_len = max_model_len
        self._max_logprobs = config.max_logprobs
        self._limits = limits
        self._max_tokens_cap = self._server_max_tokens(checkpoint, config)
        eos = tokenizer.eos_token_id
        if eos is None and checkpoint.eos_token_ids:
            eos = checkpoint.eos_token_ids[0]
        self._eos_token_id = eos
        self._secondary_eos = tuple(token_id for token_id in checkpoint.eos_token_ids if token_id != eos)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that end an answer of this model by themselves."""
        eos = () if self._eos_token_id is None else (self._eos_token_id,)
        return frozenset((*eos, *self._secondary_eos))

    def process(
        self, prompt_token_ids: list[int], params: SamplingParams, *, request_id: str, options: RequestOptions
    ) -> EngineCoreRequest:
        """Check a request against the model and give it in the form the engine takes. Raises InvalidRequest.

        request_id is the client's; the engine's own id gets a random suffix, which makes equal client ids harmless.
        """
        self._check_prompt(prompt_token_ids)
        _check_options(options)
        params = normalize(self._with_max_tokens(params, len(prompt_token_ids)), self._limits)
        self._check_vocabulary(params)
        self._check_logprobs(params)
        if options.prompt_embeds is not None:
            self._check_prompt_embeds(options.prompt_embeds, len(prompt_token_ids), params)
        return EngineCoreRequest(
            request_id=internal_id(request_id),
            prompt_token_ids=prompt_token_ids,
            sampling_params=self._with_model_values(params),
            arrival_time=options.arrival_time,
            cache_salt=options.cache_salt,
            priority=options.priority,
            external_req_id=request_id,
            prompt_embeds=options.prompt_embeds,
        )

    def process_pooling(
        self, prompt_token_ids: list[int], params: PoolingParams, *, request_id: str, options: RequestOptions
    ) -> EngineCoreRequest:
        """Check a request to a pooling model and give it in the form the engine takes. Raises InvalidRequest."""
        pooler = self._pooler
        if pooler is None:
            raise InvalidRequest("the model generates text and gives no pooled results")
        if params.task not in pooler.tasks:
            raise InvalidRequest(f"task {params.task!r} is not one of this model's: {', '.join(pooler.tasks)}")
        self._check_prompt(prompt_token_ids, num_reserved=0)
        _check_options(options)
        _check_dimensions(params.dimensions, pooler, self._hidden_size)
        if params.second_text_start is not None and not self._has_token_types:
            params = msgspec.structs.replace(params, second_text_start=None)
        # Only the last row can be had without computing all of them.
        needs_all = params.task.startswith("token_") or pooler.pooling_type != "last"
        return EngineCoreRequest(
            request_id=internal_id(request_id),
            prompt_token_ids=prompt_token_ids,
            sampling_params=SamplingParams(
                max_tokens=1,
                output_kind=OutputKind.FINAL_ONLY,
                detokenize=False,
                skip_reading_prefix_cache=needs_all,
            ),
            arrival_time=options.arrival_time,
            cache_salt=options.cache_salt,
            priority=options.priority,
            external_req_id=request_id,
            pooling_params=params,
        )

    @staticmethod
    def _server_max_tokens(checkpoint: Checkpoint, config: ModelConfig) -> int | None:
        """The server's own limit on output: set by an override or a chosen folder, not by the model's file."""
        if config.generation_config == "auto":
            limit = config.override_generation_config.get("max_new_tokens")
        else:
            limit = default_sampling(checkpoint, config).get("max_new_tokens")
        return None if limit is None else int(limit)

    def _check_prompt(self, token_ids: list[int], *, num_reserved: int = 1) -> None:
        limit = self._max_model_len
        if not token_ids:
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        if num_reserved == 0 and len(token_ids) > limit:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens and the model takes {limit} at most; shorten it or set "
                "truncate_prompt_tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        if num_reserved and len(token_ids) >= limit:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens and the model's context is {limit} tokens, which must also "
                f"hold at least one output token; shorten the prompt to at most {limit - 1} tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        self._check_ids(token_ids, "prompt")

    def _check_prompt_embeds(self, embeds: np.ndarray, num_prompt_tokens: int, params: SamplingParams) -> None:
        if not self._takes_embeds:
            raise InvalidRequest(
                "prompt_embeds is not accepted by this server; start it with --enable-prompt-embeds",
                param="prompt_embeds",
            )
        if embeds.dtype != np.float32 or embeds.shape != (num_prompt_tokens, self._hidden_size):
            raise InvalidRequest(
                f"prompt_embeds has shape {list(embeds.shape)}; [{num_prompt_tokens}, {self._hidden_size}] is needed",
                param="prompt_embeds",
            )
        if params.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs needs token ids, and prompt_embeds has none; leave one of them out",
                param="prompt_logprobs",
            )

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
        self._check_ids(params.logprob_token_ids or (), "logprob_token_ids")

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


def _check_dimensions(dimensions: int | None, pooler: PoolerConfig, size: int) -> None:
    """Refuse to cut embeddings to a length that the model was not made for."""
    if dimensions is None:
        return
    if not pooler.is_matryoshka:
        raise InvalidRequest(
            f"dimensions={dimensions} is not possible: this model's embeddings cannot be cut, they have {size} "
            "elements; leave it out",
            param="dimensions",
        )
    allowed = pooler.dimensions
    if not 1 <= dimensions <= size or (allowed and dimensions not in allowed):
        choices = f"one of {', '.join(map(str, allowed))}" if allowed else f"1 to {size}"
        raise InvalidRequest(f"dimensions must be {choices}, got {dimensions}", param="dimensions")


def _check_options(options: RequestOptions) -> None:
    if not -_INT64_MAX <= options.priority <= _INT64_MAX:
        raise InvalidRequest(f"priority must fit in 64 bits, got {options.priority}", param="priority")
    salt = options.cache_salt
    if salt is not None and not (0 < len(salt) <= MAX_SALT_CHARS and salt.isprintable()):
        raise InvalidRequest(
            f"cache_salt must be 1 to {MAX_SALT_CHARS} visible characters, got {len(salt)} characters",
            param="cache_salt",
        )
