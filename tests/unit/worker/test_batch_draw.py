"""The two drawers of a step give the same tokens, and a row that cannot be drawn fails alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve.kernels.cpu.binding import load_library
from serve.sampling_params import SamplingParams
from serve.worker.logits_processors import ProcessorChain
from serve.worker.sample.batch_draw import LibraryDrawer, NumpyDrawer, plan_draws
from serve.worker.sample.row import RowSampling, prepare_row
from serve.worker.sampler import FAILED, Sampler, build_sampling_batch

VOCAB = 3000
PARAMS = [
    SamplingParams(seed=3),
    SamplingParams(seed=-4, temperature=0.7, top_k=40),
    SamplingParams(seed=5, top_p=0.8),
    SamplingParams(seed=2**63, min_p=0.02, temperature=1.6),
    SamplingParams(seed=7, top_k=300, top_p=0.9, min_p=0.001),
]


def rows_of(params: list[SamplingParams]) -> list[RowSampling]:
    tokens = np.zeros(4, dtype=np.int32)
    return [prepare_row(p, tokens, num_prompt_tokens=1, num_tokens=1, vocab_size=VOCAB) for p in params]


@pytest.mark.parametrize("is_scaled", [False, True])
def test_library_and_numpy_draw_the_same_tokens(is_scaled: bool) -> None:
    if load_library().library is None:
        pytest.skip("there is no library to compare with")
    rng = np.random.default_rng(0)
    rows = rows_of(PARAMS * 40)
    logits = (rng.standard_normal((len(rows), VOCAB)) * 2).astype(np.float32)
    plan = plan_draws(rows, list(range(1, len(rows))))
    factors = np.array([row.inverse_temperature for row in rows])
    tops = logits.max(axis=1) * (1 if is_scaled else factors)
    positions = np.arange(len(rows), dtype=np.int64)
    expected, _ = NumpyDrawer(VOCAB).draw(logits, plan, tops, positions, is_scaled=is_scaled, wants_kept=False)
    drawn = LibraryDrawer().draw(logits, plan, tops, positions, is_scaled=is_scaled, wants_kept=False)
    assert drawn == (expected, [])
    assert len(set(expected)) > 50


def test_library_and_numpy_keep_the_same_ids() -> None:
    if load_library().library is None:
        pytest.skip("there is no library to compare with")
    rows = rows_of(PARAMS)
    logits = (np.random.default_rng(1).standard_normal((len(rows), VOCAB)) * 2).astype(np.float32)
    plan = plan_draws(rows, list(range(len(rows))))
    positions = np.zeros(len(rows), dtype=np.int64)
    tops = logits.max(axis=1)
    _, expected = NumpyDrawer(VOCAB).draw(logits, plan, tops, positions, is_scaled=True, wants_kept=True)
    _, kept = LibraryDrawer().draw(logits, plan, tops, positions, is_scaled=True, wants_kept=True)
    for own, other in zip(kept, expected, strict=True):
        assert (own is None and other is None) or np.array_equal(own, other)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logits_that_a_low_temperature_drives_out_of_range_fail_their_row_alone(mode: str) -> None:
    params = [SamplingParams(temperature=0.01, seed=1), SamplingParams(temperature=0.01, seed=1, logprobs=0)]
    rows = rows_of([params[0], *params])
    logits = np.random.default_rng(2).standard_normal((3, VOCAB)).astype(np.float32)
    logits[0, 7] = 3e37
    batch = build_sampling_batch(["a", "b", "c"], rows)
    with np.errstate(over="ignore"):
        output = Sampler(VOCAB, mode, ProcessorChain([])).sample(
            torch.from_numpy(logits), batch, np.ones(3, dtype=np.int64), None
        )
    assert list(output.errors) == [0]
    assert output.token_ids[0] == FAILED
    assert all(0 <= token < VOCAB for token in output.token_ids[1:])
