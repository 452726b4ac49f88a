"""Start-up sizing and its refusals. The spec below needs 2 layers * 1024 bytes = 2 KiB per block of 16 tokens."""

from __future__ import annotations

import pytest

from serve.config import CacheConfig
from serve.core.kv_cache_sizing import size_kv_cache
from serve.errors import ConfigError, ExitCode
from serve.wire.step import KVCacheSpec
from tests.unit.core.scripted import make_config

KIB = 1024


def make_spec(window: int | None = None) -> KVCacheSpec:
    return KVCacheSpec(2, 16, 1, 8, "float32", KIB, window)


def test_blocks_fill_the_bytes_and_one_is_the_null_block() -> None:
    size = size_kv_cache(make_config(max_model_len=128), make_spec(), available_bytes=100 * KIB, model_max_len=1024)
    assert size.num_blocks == 50
    assert size.num_tokens == 49 * 16
    assert size.max_concurrency == pytest.approx(49 / 8)
    assert size.max_model_len == 128


def test_an_override_replaces_the_measured_number() -> None:
    config = make_config(max_model_len=128, cache=CacheConfig(num_gpu_blocks_override=9))
    size = size_kv_cache(config, make_spec(), available_bytes=0, model_max_len=1024)
    assert size.num_blocks == 9
    assert size.max_concurrency == 1.0


@pytest.mark.parametrize("available", [-5 * KIB, 0, 2 * KIB])
def test_no_room_at_all_is_refused(available: int) -> None:
    with pytest.raises(ConfigError, match=r"no room for a KV cache.*--gpu-memory-utilization") as caught:
        size_kv_cache(make_config(), make_spec(), available_bytes=available, model_max_len=1024)
    assert caught.value.exit_code is ExitCode.RESOURCES


def test_a_length_that_does_not_fit_is_refused_with_the_longest_that_does() -> None:
    gib = 1 << 20
    config = make_config(max_model_len=256)
    spec = KVCacheSpec(2, 16, 1, 8, "float32", gib * 64)
    with pytest.raises(ConfigError) as caught:
        size_kv_cache(config, spec, available_bytes=11 * 128 * gib, model_max_len=1024)
    # 11 blocks, 10 usable: 160 tokens; 256 tokens need 16 blocks of 128 MiB = 2 GiB; 10 blocks are 1.25 GiB.
    assert str(caught.value) == (
        "max_model_len=256 needs 2.0000 GiB of KV cache and 1.2500 GiB are available (estimated maximum length: 160); "
        "raise --gpu-memory-utilization or --kv-cache-memory-bytes, or lower --max-model-len to at most 160"
    )
    assert caught.value.exit_code is ExitCode.RESOURCES


def test_an_override_that_is_too_small_is_refused_too() -> None:
    config = make_config(max_model_len=256, cache=CacheConfig(num_gpu_blocks_override=8))
    with pytest.raises(ConfigError, match="estimated maximum length: 112"):
        size_kv_cache(config, make_spec(), available_bytes=1 << 30, model_max_len=1024)


def test_auto_length_is_the_longest_that_fits() -> None:
    config = make_config(max_model_len=-1, cache=CacheConfig(num_gpu_blocks_override=8))
    size = size_kv_cache(config, make_spec(), available_bytes=0, model_max_len=1024)
    assert size.max_model_len == 112
    assert size.max_concurrency == 1.0


def test_auto_length_is_at_most_the_models() -> None:
    config = make_config(max_model_len=-1)
    size = size_kv_cache(config, make_spec(), available_bytes=1 << 30, model_max_len=1000)
    assert size.max_model_len == 1000


def test_a_window_lets_long_requests_fit() -> None:
    # ceil((32 - 1 + 256) / 16) + 1 = 19 blocks hold any length.
    config = make_config(max_model_len=1024, cache=CacheConfig(num_gpu_blocks_override=20))
    size = size_kv_cache(config, make_spec(window=32), available_bytes=0, model_max_len=1024)
    assert size.max_model_len == 1024
    assert size.max_concurrency == 1.0
    smaller = make_config(max_model_len=1024, cache=CacheConfig(num_gpu_blocks_override=19))
    with pytest.raises(ConfigError, match="estimated maximum length: 288"):
        size_kv_cache(smaller, make_spec(window=32), available_bytes=0, model_max_len=1024)
