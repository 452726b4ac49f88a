"""How one request samples: the values that cross the wire, and the checks that need no model."""

from __future__ import annotations

import enum
import math
from typing import Final, Literal

import msgspec

from serve.errors import InvalidRequest
from serve.limits import RequestLimits, check_count, too_many

GREEDY_EPSILON: Final = 1e-5
MIN_TEMPERATURE: Final = 0.01
# A loop is looked for at every token, so its length is bounded.
MAX_PATTERN_SIZE: Final = 1024
MAX_PATTERN_TOKENS: Final = 65536
# What a model's generation config, or the server, may set for requests that leave it open.
DEFAULT_SAMPLING_KEYS: Final = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
DEFAULT_LIMITS: Final = RequestLimits()
_INT64_MAX: Final = 2**63 - 1


class OutputKind(enum.IntEnum):
    """What the front end hands over: all so far, only what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]


class StructuredOutputs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the text of an answer must be; the engine core compiles it to a grammar.

    spec is a JSON schema as JSON text, a regular expression, a JSON list of strings (choice), a grammar in Lark, EBNF
    or GBNF, or a structural tag as JSON text; empty for json_object. Equal values share one compiled grammar.
    """

    kind: ConstraintKind
    spec: str = ""
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class ReasoningBounds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the thinking of an answer ends; a constraint binds only after it.

    end_text is the mark that ends it, end_token_ids the ids to force when max_tokens (the thinking budget, None for
    no limit) is used up. With start_token_id the answer may also begin without thinking: it thinks when that token
    comes first. Without it the answer begins inside the thinking.
    """

    end_text: str
    end_token_ids: tuple[int, ...]
    start_token_id: int | None = None
    max_tokens: int | None = None


class RepetitionDetection(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Stop an answer that loops: a pattern of min_size to max_size tokens that ends it min_count times in a row."""

    min_size: int
    max_size: int
    min_count: int


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampling settings of one request, complete and checked; the engine core trusts them.

    seed None means unpredictable. top_k 0 = off. logprobs / prompt_logprobs: None = off, k >= 0 = that many
    besides the sampled token, -1 = whole vocabulary. stop_token_ids holds the request's and the model's secondary
    end ids; eos_token_id is the primary one (None with ignore_eos). all_stop_token_ids is what min_tokens masks.
    bad_words_token_ids are the tokenized bad_words. max_tokens is resolved against the context before the wire.
    visible_token_ids are special tokens whose text is kept although skip_special_tokens is set: the marks that a
    parser of tool calls or reasoning looks for. logprob_token_ids replace the top k: exactly their values are given.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE
    detokenize: bool = True
    skip_reading_prefix_cache: bool = False
    eos_token_id: int | None = None
    all_stop_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    extra_args: dict[str, str | int | float | list[str | int | float]] | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning: ReasoningBounds | None = None
    visible_token_ids: tuple[int, ...] = ()
    logprob_token_ids: tuple[int, ...] | None = None
    repetition_detection: RepetitionDetection | None = None

    @property
    def is_greedy(self) -> bool:
        """True when the argmax is taken instead of a draw."""
        return self.temperature < GREEDY_EPSILON


def normalize(params: SamplingParams, limits: RequestLimits = DEFAULT_LIMITS) -> SamplingParams:
    """Check every value that needs no model and return the canonical form.

    Raises InvalidRequest naming field, value and limit. A temperature in (0, 0.01) becomes 0.01; greedy requests
    drop top_p, top_k and min_p; top_k -1 becomes 0; bias values are clipped to [-100, 100].
    """
    _check_ranges(params)
    _check_lists(params, limits)
    _check_patterns(params)
    changes: dict[str, object] = {}
    if GREEDY_EPSILON <= params.temperature < MIN_TEMPERATURE:
        changes["temperature"] = MIN_TEMPERATURE
    if params.is_greedy:
        changes.update(top_p=1.0, top_k=0, min_p=0.0)
    elif params.top_k == -1:
        changes["top_k"] = 0
    if params.logit_bias:
        changes["logit_bias"] = {k: max(-100.0, min(100.0, v)) for k, v in params.logit_bias.items()}
    if params.prompt_logprobs is not None:
        changes["skip_reading_prefix_cache"] = True
    return msgspec.structs.replace(params, **changes) if changes else params


def _require(ok: bool, param: str, rule: str, value: object) -> None:
    if not ok:
        raise InvalidRequest(f"{param} must be {rule}, got {value!r}", param=param)


def _check_ranges(p: SamplingParams) -> None:
    for name in _FLOAT_FIELDS:
        value = _FLOAT_FIELDS[name](p)
        _require(math.isfinite(value), name, "a finite number", value)
    _require(p.n >= 1, "n", "at least 1", p.n)
    _require(0.0 <= p.temperature <= 2.0, "temperature", "in [0, 2]", p.temperature)
    _require(0.0 < p.top_p <= 1.0, "top_p", "in (0, 1]", p.top_p)
    _require(-1 <= p.top_k <= _INT64_MAX, "top_k", "-1, 0 (both off) or a positive integer", p.top_k)
    _require(0.0 <= p.min_p <= 1.0, "min_p", "in [0, 1]", p.min_p)
    _require(-2.0 <= p.presence_penalty <= 2.0, "presence_penalty", "in [-2, 2]", p.presence_penalty)
    _require(-2.0 <= p.frequency_penalty <= 2.0, "frequency_penalty", "in [-2, 2]", p.frequency_penalty)
    _require(p.repetition_penalty > 0.0, "repetition_penalty", "greater than 0", p.repetition_penalty)
    _require(p.seed is None or -_INT64_MAX - 1 <= p.seed <= _INT64_MAX, "seed", "a signed 64-bit integer", p.seed)
    _require(p.max_tokens >= 1, "max_tokens", "at least 1", p.max_tokens)
    _require(p.min_tokens >= 0, "min_tokens", "at least 0", p.min_tokens)
    _require(p.min_tokens <= p.max_tokens, "min_tokens", f"at most max_tokens={p.max_tokens}", p.min_tokens)
    for name, count in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
        _require(count is None or count >= -1, name, "at least 0, or -1 for the whole vocabulary", count)


_FLOAT_FIELDS: Final = {
    "temperature": lambda p: p.temperature,
    "top_p": lambda p: p.top_p,
    "min_p": lambda p: p.min_p,
    "presence_penalty": lambda p: p.presence_penalty,
    "frequency_penalty": lambda p: p.frequency_penalty,
    "repetition_penalty": lambda p: p.repetition_penalty,
}


def _check_lists(p: SamplingParams, limits: RequestLimits) -> None:
    if p.n > limits.max_n:
        raise too_many(p.n, limits.max_n, param="n", what="choices", flag_name="--max-n")
    check_count(p.stop, limits.max_stop, param="stop", what="strings", flag_name="--max-stop")
    _require(all(p.stop), "stop", "free of empty strings", list(p.stop))
    _check_chars(p.stop, limits.max_stop_chars, param="stop", flag_name="--max-stop-chars")
    _require(not p.stop or p.detokenize, "stop", "empty when detokenize is false", list(p.stop))
    ids = p.stop_token_ids
    check_count(ids, limits.max_stop_token_ids, param="stop_token_ids", what="ids", flag_name="--max-stop-token-ids")
    check_count(p.bad_words, limits.max_bad_words, param="bad_words", what="strings", flag_name="--max-bad-words")
    _require(all(p.bad_words), "bad_words", "free of empty strings", list(p.bad_words))
    _check_chars(p.bad_words, limits.max_bad_words_chars, param="bad_words", flag_name="--max-bad-words-chars")
    if p.allowed_token_ids is not None:
        _require(len(p.allowed_token_ids) > 0, "allowed_token_ids", "a non-empty list", [])
    bias = p.logit_bias or {}
    check_count(bias, limits.max_logit_bias, param="logit_bias", what="entries", flag_name="--max-logit-bias")
    for value in bias.values():
        _require(math.isfinite(value), "logit_bias", "made of finite numbers", value)
    _check_logprob_token_ids(p, limits.max_logprob_token_ids)


def _check_chars(texts: tuple[str, ...], limit: int, *, param: str, flag_name: str) -> None:
    num_chars = sum(len(text) for text in texts)
    if num_chars > limit:
        raise too_many(num_chars, limit, param=param, what="characters in total", flag_name=flag_name)


def _check_logprob_token_ids(p: SamplingParams, limit: int) -> None:
    name, ids = "logprob_token_ids", p.logprob_token_ids
    if ids is None:
        return
    check_count(ids, limit, param=name, what="ids", flag_name="--max-logprob-token-ids")
    _require(len(ids) > 0, name, "a non-empty list", [])
    _require(len(set(ids)) == len(ids), name, "free of repeated ids", list(ids))
    if p.logprobs is None:
        raise InvalidRequest("logprob_token_ids needs logprobs; ask for them too", param=name)
    if p.logprobs not in (0, len(ids)):
        raise InvalidRequest(
            f"logprob_token_ids holds {len(ids)} ids and {p.logprobs} best tokens are asked for; ask for none or for "
            f"{len(ids)}",
            param=name,
        )


def _check_patterns(p: SamplingParams) -> None:
    loop = p.repetition_detection
    if loop is None:
        return
    name = "repetition_detection"
    _require(loop.min_count >= 2, f"{name}.min_count", "at least 2", loop.min_count)
    _require(loop.min_size >= 1, f"{name}.min_pattern_size", "at least 1", loop.min_size)
    _require(
        loop.min_size <= loop.max_size <= MAX_PATTERN_SIZE,
        f"{name}.max_pattern_size",
        f"min_pattern_size={loop.min_size} to {MAX_PATTERN_SIZE}",
        loop.max_size,
    )
    _require(
        loop.max_size * loop.min_count <= MAX_PATTERN_TOKENS,
        f"{name}.min_count",
        f"at most {MAX_PATTERN_TOKENS} // max_pattern_size={loop.max_size}",
        loop.min_count,
    )
