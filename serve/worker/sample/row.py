"""What one running request asks of the sampler, prepared once when the worker learns of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serve.sampling_params import SamplingParams
from serve.worker.sample.penalties import PenaltyState

Ids = NDArray[np.intp]


@dataclass(slots=True)
class RowSampling:
    """One request's sampling settings as arrays and flags.

    token_ids   [max_model_len + 1] int32, the request's row of the persistent token array (a view)
    min_p, top_p, top_k: neutral values are 0, 1 and 0; has_filter tells whether any is set
    bad_tokens  ids of one-token bad words; bad_sequences the longer ones
    penalties   None when all three penalties are neutral
    num_logprobs: None = off, else the number of best tokens besides the sampled one
    logprob_ids: the tokens to report in the place of the best, None for the best
    """

    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    seed: int
    is_greedy: bool
    inverse_temperature: np.float32
    min_p: float
    top_p: float
    top_k: int
    has_filter: bool
    allowed_ids: Ids | None
    bad_tokens: Ids | None
    bad_sequences: tuple[tuple[int, ...], ...]
    min_tokens: int
    stop_ids: Ids
    bias_ids: Ids | None
    bias_values: NDArray[np.float32]
    penalties: PenaltyState | None
    num_logprobs: int | None
    logprob_ids: Ids | None


def prepare_row(
    params: SamplingParams,
    token_ids: NDArray[np.int32],
    *,
    num_prompt_tokens: int,
    num_tokens: int,
    vocab_size: int,
    has_prompt_ids: bool = True,
) -> RowSampling:
    """Prepare a request's settings; token_ids is its row, filled up to num_tokens.

    Without has_prompt_ids the prompt was given as embeddings, and its ids mean nothing.

    A request without a seed gets one from the operating system's entropy. Stop ids and bad words that the model
    cannot generate are left out: a tokenizer may know more ids than the model's head.
    """
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    is_greedy = params.is_greedy
    bias = params.logit_bias or {}
    bad_words = [word for word in params.bad_words_token_ids if word[-1] < vocab_size]
    singles = [word[0] for word in bad_words if len(word) == 1]
    first_id = 0 if has_prompt_ids else num_prompt_tokens
    return RowSampling(
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        seed=params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little"),
        is_greedy=is_greedy,
        inverse_temperature=np.float32(1.0 if is_greedy else 1.0 / params.temperature),
        min_p=params.min_p,
        top_p=params.top_p,
        top_k=top_k,
        has_filter=top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0,
        allowed_ids=None if params.allowed_token_ids is None else _ids(params.allowed_token_ids),
        bad_tokens=_ids(singles) if singles else None,
        bad_sequences=tuple(word for word in bad_words if len(word) > 1),
        min_tokens=params.min_tokens,
        stop_ids=_ids(token_id for token_id in params.all_stop_token_ids if token_id < vocab_size),
        bias_ids=_ids(bias) if bias else None,
        bias_values=np.array(list(bias.values()), dtype=np.float32),
        penalties=_penalties(params, token_ids[first_id:num_tokens], num_prompt_tokens - first_id),
        num_logprobs=resolve_num_logprobs(params.logprobs, vocab_size),
        logprob_ids=None if params.logprob_token_ids is None else _ids(params.logprob_token_ids),
    )


def resolve_num_logprobs(num_logprobs: int | None, vocab_size: int) -> int | None:
    """Give how many best tokens a table lists: -1 and all above the vocabulary mean the whole vocabulary."""
    if num_logprobs is None:
        return None
    return vocab_size if num_logprobs == -1 else min(num_logprobs, vocab_size)


def _penalties(params: SamplingParams, token_ids: NDArray[np.int32], num_prompt_tokens: int) -> PenaltyState | None:
    if params.repetition_penalty == 1.0 and params.frequency_penalty == 0.0 and params.presence_penalty == 0.0:
        return None
    return PenaltyState(
        token_ids,
        num_prompt_tokens,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
    )


def _ids(token_ids: Iterable[int]) -> Ids:
    return np.array(list(token_ids), dtype=np.intp)
