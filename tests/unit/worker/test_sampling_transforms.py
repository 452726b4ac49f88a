"""Every transform of the sampler against a slow float64 reference that sorts the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serve.sampling_params import SamplingParams
from serve.wire.step import GrammarOutput
from serve.worker.logits_processors import ProcessorChain
from serve.worker.sample.row import RowSampling, prepare_row
from serve.worker.sampler import FAILED, Sampler, SamplerOutput, build_sampling_batch

VOCAB = 300
MAX_LEN = 64


def make_row(params: SamplingParams, prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> RowSampling:
    token_ids = np.zeros(MAX_LEN, dtype=np.int32)
    known = [*prompt, *output]
    token_ids[: len(known)] = known
    return prepare_row(params, token_ids, num_prompt_tokens=len(prompt), num_tokens=len(known), vocab_size=vocab_size)


def sample(
    logits: NDArray[np.float32],
    requests: Sequence[tuple[SamplingParams, Sequence[int], Sequence[int]]],
    *,
    mode: str = "processed_logprobs",
    grammar: GrammarOutput | None = None,
) -> SamplerOutput:
    """Sample one row for each (params, prompt, output)."""
    vocab_size = logits.shape[1]
    rows = [make_row(params, prompt, output, vocab_size) for params, prompt, output in requests]
    batch = build_sampling_batch([f"r{i}" for i in range(len(rows))], rows)
    num_tokens = np.array([len(prompt) + len(output) for _, prompt, output in requests], dtype=np.int64)
    sampler = Sampler(vocab_size, mode, ProcessorChain([]))
    return sampler.sample(torch.from_numpy(logits.copy()), batch, num_tokens, grammar)


def processed(
    params: SamplingParams, logits: NDArray[np.float32], prompt: Sequence[int], output: Sequence[int]
) -> NDArray[np.float64]:
    """Give the sampler's processed logprobs of one row, by token id."""
    result = sample(logits[None], [(params, prompt, output)])
    assert result.errors == {}
    table = result.logprobs[0]
    values = np.full(len(logits), np.nan)
    values[table.token_ids[0]] = table.logprobs[0]
    return values


def reference(
    params: SamplingParams, logits: NDArray[np.float32], prompt: Sequence[int], output: Sequence[int]
) -> NDArray[np.float64]:
    """Compute processed logprobs step by step as the documentation words them."""
    row = logits.astype(np.float64)
    vocab = len(row)
    if params.allowed_token_ids is not None:
        for token in range(vocab):
            if token not in params.allowed_token_ids:
                row[token] = -np.inf
    for word in params.bad_words_token_ids:
        prefix = list(word[:-1])
        if len(prefix) <= len(output) and list(output[len(output) - len(prefix) :]) == prefix:
            row[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        for token in params.all_stop_token_ids:
            row[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for token in range(vocab):
        if token in prompt or token in output:
            row[token] = (
                row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
            )
        count = list(output).count(token)
        row[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.temperature < 1e-5:
        return log_softmax(row)
    row = row / params.temperature
    probs = np.exp(log_softmax(row))
    row[probs < params.min_p * probs.max()] = -np.inf
    if 0 < params.top_k < vocab:
        row[row < np.sort(row)[::-1][params.top_k - 1]] = -np.inf
    if params.top_p < 1.0:
        probs = np.exp(log_softmax(row))
        # Ascending by value; of equal values the higher id comes first, so the lower one is the heavier.
        ascending = sorted(range(vocab), key=lambda token: (probs[token], -token))
        mass = 0.0
        for token in ascending[:-1]:
            mass += probs[token]
            if mass <= 1.0 - params.top_p:
                row[token] = -np.inf
    return log_softmax(row)


def log_softmax(row: NDArray[np.float64]) -> NDArray[np.float64]:
    top = row.max()
    log_probs: NDArray[np.float64] = row - top - math.log(np.exp(row - top).sum())
    return log_probs


def random_logits(seed: int, vocab: int = VOCAB, scale: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


PROMPT = [1, 2, 3, 2, 50]
OUTPUT = [2, 60, 60, 61, 7]
CASES = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=2.0),
    "allowed_ids": SamplingParams(allowed_token_ids=(4, 9, 299)),
    "one_token_bad_word": SamplingParams(bad_words_token_ids=((5,), (60,))),
    "bad_word_that_continues_the_output": SamplingParams(bad_words_token_ids=((60, 61, 7, 8), (7, 9))),
    "bad_word_that_does_not": SamplingParams(bad_words_token_ids=((61, 8), (50, 2, 9), (1, 1, 1, 1, 1, 1, 1, 1))),
    "min_tokens_not_reached": SamplingParams(min_tokens=6, max_tokens=9, all_stop_token_ids=(0, 11)),
    "min_tokens_reached": SamplingParams(min_tokens=5, max_tokens=9, all_stop_token_ids=(0, 11)),
    "logit_bias": SamplingParams(logit_bias={4: 5.0, 60: -100.0, 299: 2.5}),
    "repetition": SamplingParams(repetition_penalty=1.3),
    "repetition_below_one": SamplingParams(repetition_penalty=0.7),
    "frequency": SamplingParams(frequency_penalty=0.8),
    "presence": SamplingParams(presence_penalty=-1.5),
    "all_penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.3),
    "bias_before_penalties": SamplingParams(logit_bias={60: 4.0, 3: -4.0}, repetition_penalty=1.5),
    "mask_wins_over_bias": SamplingParams(allowed_token_ids=(4, 9), logit_bias={5: 100.0}),
    "min_p": SamplingParams(min_p=0.1),
    "min_p_after_temperature": SamplingParams(min_p=0.1, temperature=0.5),
    "min_p_1": SamplingParams(min_p=1.0),
    "top_k_1": SamplingParams(top_k=1),
    "top_k": SamplingParams(top_k=7),
    "top_k_above_block_count": SamplingParams(top_k=40),
    "top_k_all": SamplingParams(top_k=VOCAB + 5),
    "top_p": SamplingParams(top_p=0.8),
    "top_p_tiny": SamplingParams(top_p=1e-6),
    "top_p_nearly_1": SamplingParams(top_p=0.9999),
    "top_p_after_top_k": SamplingParams(top_k=5, top_p=0.7),
    "top_k_above_the_allowed_ids": SamplingParams(allowed_token_ids=(4, 9), top_k=10, top_p=0.99),
    "everything": SamplingParams(
        temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.2,
        repetition_penalty=1.1, logit_bias={4: 1.0}, bad_words_token_ids=((9,),), min_tokens=6, max_tokens=9,
        all_stop_token_ids=(0,),
    ),
    "greedy": SamplingParams(temperature=0.0),
    "greedy_with_penalties": SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_distribution_equals_the_reference(name: str, seed: int) -> None:
    params = with_full_logprobs(CASES[name])
    logits = random_logits(seed)
    got = processed(params, logits, PROMPT, OUTPUT)
    expected = reference(params, logits, PROMPT, OUTPUT)
    assert np.array_equal(np.isneginf(got), np.isneginf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-5, atol=2e-5)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([2, 31, 128, 129, 1000]),
    scale=st.sampled_from([0.01, 1.0, 8.0]),
    temperature=st.sampled_from([0.01, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 400]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
def test_filters_keep_the_same_tokens_as_the_reference(
    seed: int, vocab: int, scale: float, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    params = with_full_logprobs(SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p))
    logits = random_logits(seed, vocab, scale)
    got = processed(params, logits, [0], [])
    expected = reference(params, logits, [0], [])
    differing = np.flatnonzero(np.isneginf(got) != np.isneginf(expected))
    # A token whose accumulated mass is within rounding of the limit may fall on either side.
    assert len(differing) <= 1
    for token in differing:
        assert max(got[token], expected[token]) < math.log(0.5) or vocab == 2


def with_full_logprobs(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, logprobs=-1)


def test_ties_at_the_kth_value_are_all_kept() -> None:
    logits = np.zeros(200, dtype=np.float32)
    logits[[3, 70, 150, 199]] = 2.0
    got = processed(SamplingParams(top_k=2, logprobs=-1), logits, [0], [])
    assert np.flatnonzero(np.isfinite(got)).tolist() == [3, 70, 150, 199]
    np.testing.assert_allclose(got[[3, 70, 150, 199]], math.log(0.25), rtol=1e-6)


def test_top_p_always_keeps_the_top_token() -> None:
    logits = random_logits(5)
    got = processed(SamplingParams(top_p=1e-9, logprobs=-1), logits, [0], [])
    assert np.flatnonzero(np.isfinite(got)).tolist() == [int(logits.argmax())]


def test_greedy_takes_the_lowest_id_of_equal_maxima() -> None:
    logits = np.zeros((1, 50), dtype=np.float32)
    logits[0, [7, 33]] = 4.0
    assert sample(logits, [(SamplingParams(temperature=0.0), [1], [])]).token_ids == [7]


def bitmask_of(allowed: Sequence[int], words: int) -> NDArray[np.int32]:
    bits = np.zeros(words, dtype=np.uint32)
    for token in allowed:
        bits[token // 32] |= np.uint32(1 << (token % 32))
    return bits.view(np.int32)


def test_grammar_leaves_only_its_tokens_and_only_in_its_row() -> None:
    logits = np.stack([random_logits(1, 70), random_logits(1, 70), random_logits(2, 70)])
    mask = np.stack([bitmask_of([31, 32, 69], 3), bitmask_of([63], 3)])
    greedy = SamplingParams(temperature=0.0)
    grammar = GrammarOutput(["r2", "r1"], mask)
    result = sample(logits, [(greedy, [1], [])] * 3, grammar=grammar)
    best_of_three = max([31, 32, 69], key=lambda token: logits[2, token])
    assert result.token_ids == [int(logits[0].argmax()), 63, best_of_three]


def test_grammar_row_of_a_request_that_does_not_sample_is_ignored() -> None:
    logits = random_logits(1, 64)[None]
    grammar = GrammarOutput(["elsewhere"], bitmask_of([3], 2)[None])
    result = sample(logits, [(SamplingParams(temperature=0.0), [1], [])], grammar=grammar)
    assert result.token_ids == [int(logits[0].argmax())]


def test_tokens_beyond_a_narrow_bitmask_are_forbidden() -> None:
    logits = np.zeros((1, 100), dtype=np.float32)
    logits[0, 99] = 50.0
    logits[0, 40] = 1.0
    grammar = GrammarOutput(["r0"], bitmask_of(range(64), 2)[None])
    assert sample(logits, [(SamplingParams(temperature=0.0), [1], [])], grammar=grammar).token_ids == [40]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_with_nan_or_infinity_fails_alone(bad: float, temperature: float) -> None:
    logits = np.stack([random_logits(i) for i in range(3)])
    params = SamplingParams(temperature=temperature, seed=4, logprobs=2)
    alone = [sample(logits[i : i + 1], [(params, [1], [])]).token_ids[0] for i in (0, 2)]
    logits[1, 17] = bad
    result = sample(logits, [(params, [1], [])] * 3)
    assert result.token_ids == [alone[0], FAILED, alone[1]]
    assert list(result.errors) == [1]
    assert result.errors[1].startswith("nan_logits: ")
    assert sorted(result.logprobs) == [0, 2]


def test_nan_under_a_mask_still_fails_the_row() -> None:
    logits = random_logits(0)[None]
    logits[0, 17] = math.nan
    result = sample(logits, [(SamplingParams(allowed_token_ids=(3,)), [1], [])])
    assert result.token_ids == [FAILED]
    assert result.errors[0].startswith("nan_logits: ")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_without_a_token_left_fails_alone(temperature: float) -> None:
    logits = np.stack([random_logits(i) for i in range(2)])
    empty = SamplingParams(temperature=temperature, allowed_token_ids=(5,), bad_words_token_ids=((5,),), logprobs=1)
    plain = SamplingParams(temperature=0.0)
    result = sample(logits, [(empty, [1], []), (plain, [1], [])])
    assert result.token_ids == [FAILED, int(logits[1].argmax())]
    assert result.errors[0].startswith("invalid_request: ")


def test_extreme_repetition_penalty_stays_samplable() -> None:
    logits = np.full((1, 40), -2.0, dtype=np.float32)
    logits[0, 3] = 5.0
    params = SamplingParams(repetition_penalty=1e-38, temperature=0.01)
    assert sample(logits, [(params, [3], [])]).token_ids == [3]


def test_stop_ids_and_bad_words_outside_the_models_vocabulary_are_harmless() -> None:
    logits = random_logits(0, 40)[None]
    params = SamplingParams(
        temperature=0.0, min_tokens=3, max_tokens=9, all_stop_token_ids=(40, 41), bad_words_token_ids=((50,), (1, 60))
    )
    assert sample(logits, [(params, [1], [1])]).token_ids == [int(logits[0].argmax())]
