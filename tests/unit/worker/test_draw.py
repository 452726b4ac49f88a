"""The draw and its noise: exact shares, statistics over seeds, and independence of everything else."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from serve.sampling_params import SamplingParams
from serve.worker.sample.draw import RowDrawer, nucleus, reaching_kth, top_ids
from serve.worker.sample.philox import philox_block, uniform
from serve.worker.sample.row import RowSampling, prepare_row


def row_of(params: SamplingParams, vocab_size: int) -> RowSampling:
    tokens = np.zeros(4, dtype=np.int32)
    return prepare_row(params, tokens, num_prompt_tokens=1, num_tokens=1, vocab_size=vocab_size)


def softmax(row: NDArray[np.float32]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(row.astype(np.float64) - row.max())
    weights /= weights.sum()
    return weights


@pytest.mark.parametrize("key", [(0, 0), (1, 2), (2**64 - 1, 0x73616D706C65), (0x0123456789ABCDEF, 5)])
@pytest.mark.parametrize("counter", [1, 2, 77, 2**40])
def test_philox_equals_numpys(key: tuple[int, int], counter: int) -> None:
    # numpy counts up before it encrypts.
    generator = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=counter - 1)
    assert philox_block(key, counter) == tuple(generator.random_raw(4).tolist())


def test_noise_differs_between_seeds_and_positions() -> None:
    numbers = {uniform(seed, position) for seed in (-1, 0, 1, 2**63 - 1, -(2**63)) for position in range(100)}
    assert len(numbers) == 500
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_seed_minus_one_is_an_ordinary_seed() -> None:
    assert uniform(-1, 5) == uniform(-1, 5)
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_requests_without_seed_get_different_ones() -> None:
    seeds = {row_of(SamplingParams(), 10).seed for _ in range(20)}
    assert len(seeds) == 20


def test_noise_over_neighbouring_seeds_and_positions_is_uniform() -> None:
    for numbers in (
        [uniform(seed, 9) for seed in range(4000)],
        [uniform(3, position) for position in range(4000)],
    ):
        counts = np.histogram(numbers, bins=40, range=(0, 1))[0]
        chi_square = ((counts - 100.0) ** 2 / 100.0).sum()
        # 39 degrees of freedom: 76 is exceeded once in 2,500 times; the noise is fixed, so this cannot flake.
        assert chi_square < 76


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=20),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=20, top_p=0.7, min_p=0.01),
    ],
)
@pytest.mark.parametrize("vocab_size", [5, 128, 300])
def test_share_of_the_unit_interval_equals_the_probability(params: SamplingParams, vocab_size: int) -> None:
    logits = (np.random.default_rng(vocab_size).standard_normal(vocab_size) * 2).astype(np.float32)
    drawer = RowDrawer(vocab_size)
    row = row_of(params, vocab_size)
    num_points = 5_000
    tokens = [drawer.draw(logits, row, (i + 0.5) / num_points)[0] for i in range(num_points)]
    shares = np.bincount(tokens, minlength=vocab_size) / num_points
    kept = drawer.draw(logits, row, 0.0)[1]
    expected = softmax(logits)
    if kept is not None:
        masked = np.full(vocab_size, -np.inf, dtype=np.float32)
        masked[kept] = logits[kept]
        expected = softmax(masked)
    np.testing.assert_allclose(shares, expected, atol=1.1 / num_points)


def test_draws_over_seeds_pass_a_chi_square_test() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], dtype=np.float32))
    drawer, row = RowDrawer(5), row_of(SamplingParams(), 5)
    tokens = [drawer.draw(logits, row, uniform(seed, 17))[0] for seed in range(10_000)]
    counts = np.bincount(tokens, minlength=5)
    expected = 10_000 * np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    # 4 degrees of freedom: 18.5 is exceeded once in 1,000 times.
    assert ((counts - expected) ** 2 / expected).sum() < 18.5


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_tokens_without_probability_are_never_drawn(number: float) -> None:
    logits = np.full(300, -np.inf, dtype=np.float32)
    logits[[140, 141]] = 1.0
    drawer = RowDrawer(300)
    for params in (SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.99), SamplingParams(min_p=0.1)):
        assert drawer.draw(logits, row_of(params, 300), number)[0] in (140, 141)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000, 5000])
def test_ids_that_reach_the_kth_value_are_those_of_a_full_sort(length: int) -> None:
    rng = np.random.default_rng(length)
    for values in (rng.standard_normal(length), rng.integers(0, 5, length)):
        row = values.astype(np.float32)
        ordered = np.sort(row)[::-1]
        for k in {1, 2, length // 130 + 1, length // 2 + 1, length}:
            if k <= length:
                expected = [i for i, value in enumerate(row) if value >= ordered[k - 1]]
                assert reaching_kth(row, k).tolist() == expected


def test_top_ids_orders_by_value_then_id() -> None:
    row = np.array([1.0, 5.0, 3.0, 5.0, 3.0, 3.0], dtype=np.float32)
    assert top_ids(row, 4).tolist() == [1, 3, 2, 4]


def test_nucleus_of_a_flat_distribution_keeps_the_lowest_ids() -> None:
    weights = np.ones(1000, dtype=np.float32)
    assert nucleus(weights, 0.25).tolist() == list(range(250))


@pytest.mark.parametrize("scale", [0.001, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.99])
def test_nucleus_of_a_large_vocabulary_equals_a_full_sort(scale: float, top_p: float) -> None:
    weights = np.exp(np.random.default_rng(4).standard_normal(40_000) * scale).astype(np.float32)
    ordered = np.sort(weights.astype(np.float64))[::-1]
    mass_before = np.cumsum(ordered) - ordered
    expected = int((mass_before < top_p * ordered.sum()).sum())
    kept = nucleus(weights, top_p)
    # The float32 total may move the border by a few of the forty thousand.
    assert abs(len(kept) - expected) <= 2
    assert np.array_equal(np.sort(weights[kept])[::-1], np.sort(weights)[::-1][: len(kept)])


def test_nucleus_stops_where_the_mass_is_reached() -> None:
    weights = np.array([0.1, 0.5, 0.15, 0.25], dtype=np.float32)
    assert nucleus(weights, 0.74).tolist() == [1, 3]
    assert nucleus(weights, 0.76).tolist() == [1, 2, 3]
    assert math.isclose(float(weights[nucleus(weights, 0.76)].sum()), 0.9, rel_tol=1e-6)
