"""Argmax and draws of the library against numpy and against float64 references that sort everything."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from serve.kernels.cpu import binding, sampling
from serve.kernels.ops import Ops
from serve.worker.sample.philox import uniform

NONE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
FILTERS = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 700},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
]
SIZES = [1, 5, 16, 17, 127, 300, 1000, 49152]
FLOAT32_EPS = 1e-6

Row = NDArray[np.float32]


def random_row(size: int, scale: float = 2.0) -> Row:
    return (np.random.default_rng(size).standard_normal(size) * scale).astype(np.float32)


def make_draws(count: int, **settings: float) -> NDArray[np.void]:
    draws = np.zeros(count, dtype=sampling.DRAW_ROW)
    draws["inverse_temperature"] = 1.0
    for name, value in {**NONE, **settings}.items():
        draws[name] = value
    return draws


def draw_many(row: Row, seeds: range, **settings: float) -> list[int]:
    draws = make_draws(len(seeds), **settings)
    draws["seed"] = list(seeds)
    draws["position"] = 9
    draws["top"] = row.max() * draws["inverse_temperature"]
    sampling.draw_rows(row[None], draws)
    tokens: list[int] = draws["token"].tolist()
    return tokens


def kept_ids(row: Row, **settings: float) -> list[int]:
    draws, kept = make_draws(1, **settings), np.full(len(row), -1, dtype=np.int32)
    draws["top"], draws["kept"] = row.max(), kept.ctypes.data
    sampling.draw_rows(row[None], draws)
    count = int(draws["num_kept"][0])
    assert (kept[count:] == -1).all()
    ids: list[int] = kept[:count].tolist()
    return ids


def weights_of(row: Row) -> NDArray[np.float64]:
    wide = row.astype(np.float64)
    weights: NDArray[np.float64] = np.exp(wide - wide.max())
    return weights


def reference_kept(row: Row, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> tuple[set[int], set[int]]:
    """Give the ids that must be kept and those that may be: float32 moves the border by its rounding."""
    weights = weights_of(row)
    order = sorted(range(len(row)), key=lambda i: (-weights[i], i))
    if top_k:
        order = [i for i in order if row[i] >= row[order[min(top_k, len(row)) - 1]]]
    sure = [i for i in order if weights[i] >= min_p * (1 + 1e-5)] or order[:1]
    possible = [i for i in order if weights[i] >= min_p * (1 - 1e-5)]
    if top_p == 1.0:
        return set(sure), set(possible)
    values = weights[possible]
    before, total = np.cumsum(values) - values, values.sum()
    must = [i for i, mass in zip(possible, before, strict=True) if mass < (top_p - 3e-5) * total]
    may = [i for i, mass in zip(possible, before, strict=True) if mass < (top_p + 3e-5) * total]
    return set(must or order[:1]), set(may)


@pytest.mark.parametrize("size", [*SIZES, 511, 512, 513])
def test_argmax_equals_numpys(library_ops: Ops, size: int) -> None:
    table = np.random.default_rng(size).integers(-5, 5, (7, size)).astype(np.float32)  # with many ties
    table[1] = -np.inf
    table[2, size // 2] = np.inf
    table[3, size // 2 :] = np.nan
    table[4, size - 1] = 99
    table[5, ::2] = -np.inf
    indices, tops = sampling.argmax_rows(table)
    assert indices.tolist() == table.argmax(axis=1).tolist()
    assert np.array_equal(tops, table[np.arange(7), indices], equal_nan=True)


def test_argmax_of_rows_that_lie_apart(library_ops: Ops, threads_restored: None) -> None:
    binding.set_num_threads(3)
    table = np.random.default_rng(0).standard_normal((40, 3000)).astype(np.float32)[:, :2000]
    assert sampling.argmax_rows(table)[0].tolist() == table.argmax(axis=1).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_draw_without_filters_walks_groups_then_their_tokens(library_ops: Ops, size: int) -> None:
    row = random_row(size)
    num_groups = -(-size // 128)
    order = [token for group in range(num_groups) for token in range(group, size, num_groups)]
    weights = weights_of(row)[order]
    cumulative = np.cumsum(weights) / weights.sum()
    place = {token: i for i, token in enumerate(order)}
    for seed, token in enumerate(draw_many(row, range(300))):
        noise, i = uniform(seed, 9), place[token]
        assert (cumulative[i - 1] if i else 0.0) - FLOAT32_EPS <= noise <= cumulative[i] + FLOAT32_EPS


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_filters_keep_what_a_full_sort_keeps(library_ops: Ops, size: int, settings: dict[str, float]) -> None:
    if settings.get("top_k", 0) > size:
        settings = {**settings, "top_k": size}
    row = random_row(size)
    kept = kept_ids(row, **settings)
    must, may = reference_kept(row, **settings)  # type: ignore[arg-type]
    assert kept == sorted(kept)
    assert must <= set(kept) <= may


@pytest.mark.parametrize("settings", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_draw_behind_filters_walks_the_kept_ids(library_ops: Ops, settings: dict[str, float]) -> None:
    row = random_row(5000, 3.0)
    kept = kept_ids(row, **settings)
    weights = weights_of(row)[kept]
    cumulative = np.cumsum(weights) / weights.sum()
    for seed, token in enumerate(draw_many(row, range(300), **settings)):
        noise, i = uniform(seed, 9), kept.index(token)
        assert (cumulative[i - 1] if i else 0.0) - FLOAT32_EPS <= noise <= cumulative[i] + FLOAT32_EPS


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.3])
def test_nucleus_of_a_flat_row_takes_the_lowest_ids_of_equal_weight(library_ops: Ops, scale: float) -> None:
    row = random_row(40_000, scale)
    kept = kept_ids(row, top_p=0.25)
    must, may = reference_kept(row, top_p=0.25)
    assert must <= set(kept) <= may
    if scale == 0.0:
        assert kept == list(range(10_000))


def test_ties_at_the_kth_value_are_all_kept(library_ops: Ops) -> None:
    row = np.zeros(3000, dtype=np.float32)
    row[[5, 2000]] = 2.0
    row[[100, 1500, 2999]] = 1.0
    assert kept_ids(row, top_k=3) == [5, 100, 1500, 2000, 2999]


@pytest.mark.parametrize("settings", [NONE, *FILTERS], ids=str)
def test_masked_tokens_are_never_drawn(library_ops: Ops, settings: dict[str, float]) -> None:
    row = np.full(1000, -np.inf, dtype=np.float32)
    row[[140, 141, 999]] = 1.0
    assert set(draw_many(row, range(200), **settings)) <= {140, 141, 999}


def test_temperature_scales_before_the_filters(library_ops: Ops) -> None:
    row = random_row(2000)
    scaled = row * np.float32(1 / 0.3)
    for settings in (NONE, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}):
        expected = draw_many(scaled, range(100), **settings)
        assert draw_many(row, range(100), inverse_temperature=np.float32(1 / 0.3), **settings) == expected


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_draw_of_a_row_is_the_same_in_every_batch(library_ops: Ops, threads_restored: None, num_threads: int) -> None:
    binding.set_num_threads(num_threads)
    table = np.stack([random_row(3000 + i)[:3000] for i in range(12)])
    draws = make_draws(48)
    for i in range(48):
        for name, value in {**NONE, **(NONE, *FILTERS)[i % 10]}.items():
            draws[i][name] = value
    draws["row"], draws["seed"], draws["position"] = np.arange(48) % 12, 5, np.arange(48)
    draws["top"] = table.max(axis=1)[draws["row"]]
    alone = [draws[i : i + 1].copy() for i in range(48)]
    sampling.draw_rows(table, draws)
    binding.set_num_threads(1)
    for one in alone:
        sampling.draw_rows(table, one)
    assert draws["token"].tolist() == [int(one["token"][0]) for one in alone]


@pytest.mark.parametrize(
    ("field", "value"),
    [("row", 1), ("row", -1), ("top_k", 11), ("top_k", -1), ("top", np.inf), ("min_p", 1.5), ("top_p", 0.0)],
)
def test_impossible_draw_is_refused(library_ops: Ops, field: str, value: float) -> None:
    draws = make_draws(2, top=1.0)
    draws[1][field] = value
    with pytest.raises(ValueError, match="draw 1 of row"):
        sampling.draw_rows(np.ones((1, 10), dtype=np.float32), draws)
