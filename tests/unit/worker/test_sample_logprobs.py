"""Logprob tables against torch.log_softmax, in the four modes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from serve.sampling_params import SamplingParams
from serve.worker.logits_processors import ProcessorChain
from serve.worker.sample.logprobs import gather_logprobs, to_values
from serve.worker.sample.row import prepare_row
from serve.worker.sampler import Sampler, SamplerOutput, build_sampling_batch

VOCAB = 500


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal((rows, VOCAB)) * 4).astype(np.float32))


def sample(logits: torch.Tensor, params: list[SamplingParams], mode: str) -> SamplerOutput:
    token_ids = np.zeros(8, dtype=np.int32)
    rows = [prepare_row(p, token_ids, num_prompt_tokens=1, num_tokens=1, vocab_size=VOCAB) for p in params]
    batch = build_sampling_batch([str(i) for i in range(len(rows))], rows)
    return Sampler(VOCAB, mode, ProcessorChain([])).sample(
        logits.clone(), batch, np.ones(len(rows), dtype=np.int64), None
    )


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 20, -1])
def test_table_equals_log_softmax(num_logprobs: int) -> None:
    logits = logits_of(1)
    params = SamplingParams(seed=3, logprobs=num_logprobs)
    result = sample(logits, [params], "raw_logprobs")
    table = result.logprobs[0]
    columns = VOCAB if num_logprobs == -1 else num_logprobs
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    best = torch.topk(expected, columns)
    token = result.token_ids[0]
    assert table.token_ids.shape == table.logprobs.shape == (1, columns + 1)
    assert table.token_ids[0].tolist() == [token, *best.indices.tolist()]
    np.testing.assert_allclose(table.logprobs[0, 1:], best.values.numpy(), rtol=1e-5, atol=1e-5)
    assert table.logprobs[0, 0] == pytest.approx(float(expected[token]), abs=1e-5)
    assert table.sampled_ranks.tolist() == [int((expected >= expected[token]).sum())]
    types = [array.dtype.name for array in (table.token_ids, table.logprobs, table.sampled_ranks)]
    assert types == ["int32", "float32", "int32"]


def test_rank_counts_ties() -> None:
    values = np.array([[-1.0, -3.0, -1.0, -2.0]], dtype=np.float32)
    ranks = [gather_logprobs(values, np.array([t], dtype=np.int32), 0).sampled_ranks[0] for t in range(4)]
    assert ranks == [2, 4, 2, 3]


BIASED = SamplingParams(temperature=0.5, top_k=3, logit_bias={7: 30.0}, logprobs=2, seed=1)


def test_raw_modes_ignore_every_transform() -> None:
    logits = logits_of(2)
    logprobs = sample(logits, [BIASED], "raw_logprobs").logprobs[0]
    raw = sample(logits, [BIASED], "raw_logits").logprobs[0]
    assert logprobs.token_ids[0, 0] == raw.token_ids[0, 0] == 7
    assert raw.logprobs[0, 0] == logits[0, 7]
    assert raw.logprobs[0, 1:].tolist() == torch.topk(logits[0], 2).values.tolist()
    assert logprobs.logprobs[0, 0] == pytest.approx(float(torch.log_softmax(logits[0].double(), -1)[7]), abs=1e-5)


def test_processed_modes_report_the_filtered_distribution() -> None:
    logits = logits_of(2)
    scaled = logits[0].double()
    scaled[7] += 30.0
    scaled /= 0.5
    best = torch.topk(scaled, 3)
    processed = sample(logits, [BIASED], "processed_logits").logprobs[0]
    np.testing.assert_allclose(processed.logprobs[0, 1:], best.values[:2].numpy(), rtol=1e-6)
    logprobs = sample(logits, [BIASED], "processed_logprobs").logprobs[0]
    np.testing.assert_allclose(logprobs.logprobs[0, 1:], torch.log_softmax(best.values, -1)[:2].numpy(), atol=1e-5)


def test_greedy_rows_in_processed_mode_are_not_scaled() -> None:
    logits = logits_of(3)
    table = sample(logits, [SamplingParams(temperature=0.0, logprobs=1)], "processed_logits").logprobs[0]
    assert table.logprobs[0].tolist() == [float(logits.max())] * 2


def test_masked_tokens_have_no_probability_in_processed_mode() -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=(4, 5), logprobs=3)
    table = sample(logits_of(4), [params], "processed_logprobs").logprobs[0]
    assert math.isinf(table.logprobs[0, 3])
    assert set(table.token_ids[0, :3].tolist()) == {4, 5}


def test_values_do_not_depend_on_the_other_rows() -> None:
    logits = logits_of(5, rows=9)
    together = to_values(logits, as_logprobs=True)
    for row in range(9):
        assert np.array_equal(together[row : row + 1], to_values(logits[row : row + 1], as_logprobs=True))


def test_rows_ask_for_different_numbers() -> None:
    params = [SamplingParams(temperature=0.0, logprobs=k) for k in (None, 3, 0)]
    result = sample(logits_of(6, rows=3), params, "raw_logprobs")
    assert {row: table.token_ids.shape for row, table in result.logprobs.items()} == {1: (1, 4), 2: (1, 1)}


def test_more_logprobs_than_the_vocabulary_has_are_the_whole_vocabulary() -> None:
    params = SamplingParams(temperature=0.0, logprobs=VOCAB + 3)
    assert sample(logits_of(7), [params], "raw_logprobs").logprobs[0].token_ids.shape == (1, VOCAB + 1)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_chosen_ids_stand_in_the_place_of_the_best(mode: str) -> None:
    logits = logits_of(4)
    chosen = (499, 3, 77)
    result = sample(logits, [SamplingParams(temperature=1.0, seed=2, logprobs=0, logprob_token_ids=chosen)], mode)
    table = result.logprobs[0]
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    token = result.token_ids[0]
    assert table.token_ids[0].tolist() == [token, *sorted(chosen, key=lambda i: -float(expected[i]))]
    np.testing.assert_allclose(table.logprobs[0], expected[table.token_ids[0].tolist()].numpy(), rtol=1e-5, atol=1e-5)
    assert table.sampled_ranks.tolist() == [int((expected >= expected[token]).sum())]
