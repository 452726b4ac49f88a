"""The worker's start-up calls in order, and its sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from serve.checkpoint import Checkpoint, ModelArch
from serve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, resolve
from serve.errors import ConfigError
from serve.models.registry import CausalLM
from serve.sampling_params import SamplingParams
from serve.wire.step import CachedRequestData, KVCacheConfig, KVCacheSpec, NewRequestData, SchedulerOutput
from serve.worker.worker import CPU_KV_CACHE_BYTES, Worker, activation_bytes, wanted_cache_bytes
from tests.fakes_worker import TinyAttentionModel

VOCAB = 61
TINY = TinyAttentionModel(VOCAB)
ARCH = ModelArch(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=TINY.hidden_size,
    intermediate_size=40,
    num_layers=TINY.num_layers,
    num_heads=TINY.num_heads,
    num_kv_heads=TINY.num_kv_heads,
    head_size=TINY.head_size,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    rope_theta=10000.0,
)
CHECKPOINT = Checkpoint(name="tiny", root="", format="safetensors", weight_files=(), arch=ARCH)
# block size 16, 2 heads of 16 elements for keys and for values, 4 bytes each
PAGE_BYTES = 16 * 2 * (16 + 16) * 4


def load_tiny(_c: Checkpoint, _e: EngineConfig, dtype: torch.dtype, _d: torch.device) -> CausalLM:
    assert dtype is torch.float32
    torch.set_num_threads(1)
    return TINY


def make_worker(config: EngineConfig, checkpoint: Checkpoint = CHECKPOINT) -> Worker:
    return Worker(resolve(config, checkpoint.arch.max_position_embeddings), checkpoint, load_tiny)


def started(config: EngineConfig | None = None) -> Worker:
    worker = make_worker(config or EngineConfig())
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(KVCacheConfig(num_blocks=40, block_size=16))
    worker.warm_up()
    return worker


def test_started_worker_generates_like_the_dense_model() -> None:
    worker = started()
    prompt = [3, 9, 27, 20]
    request = NewRequestData("a", prompt, 4, SamplingParams(temperature=0.0), [7], 0)
    tokens: list[int] = []
    plan = SchedulerOutput(0, [request], CachedRequestData(), {"a": 4}, 4)
    for step in range(5):
        assert worker.execute_model(plan) is None
        tokens += worker.sample_tokens(None).sampled_token_ids[0]
        plan = SchedulerOutput(step, [], CachedRequestData(["a"], [[]], [4 + step]), {"a": 1}, 1)
    assert tokens == TINY.greedy(prompt, 5)
    assert worker.dtype_name == "float32"
    assert "threads" in worker.device_description()


def test_warm_up_leaves_no_request_behind() -> None:
    worker = started(EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1)))
    request = NewRequestData("a", [1], 1, SamplingParams(temperature=0.0), [1], 0)
    worker.execute_model(SchedulerOutput(0, [request], CachedRequestData(), {"a": 1}, 1))
    assert worker.sample_tokens(None).req_ids == ["a"]


@pytest.mark.parametrize("max_model_len", [1, 2, 20])
def test_warm_up_fits_short_contexts(max_model_len: int) -> None:
    worker = started(EngineConfig(model=ModelConfig(max_model_len=max_model_len)))
    request = NewRequestData("a", [1], 1, SamplingParams(temperature=0.0), [1], 0)
    worker.execute_model(SchedulerOutput(0, [request], CachedRequestData(), {"a": 1}, 1))
    assert len(worker.sample_tokens(None).sampled_token_ids[0]) == 1


def test_spec_describes_one_layer() -> None:
    spec = make_worker(EngineConfig()).get_kv_cache_spec()
    assert (spec.num_layers, spec.num_kv_heads, spec.head_size, spec.dtype) == (2, 2, 16, "float32")
    assert spec.page_size_bytes == PAGE_BYTES
    half = make_worker(EngineConfig(cache=CacheConfig(kv_cache_dtype="bfloat16"))).get_kv_cache_spec()
    assert (half.dtype, half.page_size_bytes) == ("bfloat16", PAGE_BYTES // 2)
    small = make_worker(EngineConfig(cache=CacheConfig(kv_cache_dtype="int8"))).get_kv_cache_spec()
    scales = 2 * 4 * 2 * small.block_size  # of key and value, float32, two heads
    assert (small.dtype, small.page_size_bytes) == ("int8", PAGE_BYTES // 4 + scales)


@pytest.mark.parametrize(("layers", "expected"), [((), 64), ((0, 1), 64), ((1,), None)], ids=["unnamed", "all", "some"])
def test_window_counts_only_when_every_layer_slides(layers: tuple[int, ...], expected: int | None) -> None:
    arch = replace(ARCH, sliding_window=64, sliding_layers=layers)
    worker = make_worker(EngineConfig(), replace(CHECKPOINT, arch=arch))
    assert worker.get_kv_cache_spec().sliding_window == expected


def test_given_cache_size_is_taken_as_it_is() -> None:
    worker = make_worker(EngineConfig(cache=CacheConfig(kv_cache_memory_bytes=123_456)))
    assert worker.determine_available_memory() == 123_456


def test_cache_takes_a_bounded_part_of_the_free_memory() -> None:
    assert 0 < make_worker(EngineConfig()).determine_available_memory() <= CPU_KV_CACHE_BYTES
    small = EngineConfig(cache=CacheConfig(gpu_memory_utilization=1e-12))
    assert make_worker(small).determine_available_memory() <= 0


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "free_mib", "expected_mib"),
    [
        (512, 128, 1 << 20, 4096),  # 128 * 512 tokens are 4096 blocks of 2 MiB: above 4 GiB
        (512, 32, 1 << 20, 2050),  # 16384 tokens are 1024 blocks, and the null block
        (512, 32, 4096, 1024),  # a quarter of 4 GiB
        (32768, 1, 4096, 4100),  # one request: 2048 blocks, the null block and one for a step planned ahead
    ],
)
def test_wanted_cache(max_model_len: int, max_num_seqs: int, free_mib: int, expected_mib: int) -> None:
    """Blocks of 16 tokens with 1 MiB in each of two layers."""
    wanted = wanted_cache_bytes(
        KVCacheSpec(2, 16, 8, 64, "float32", 1 << 20),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        free_bytes=free_mib << 20,
    )
    assert wanted == expected_mib << 20


def test_cache_grows_to_one_request_of_full_length_if_memory_allows() -> None:
    length = CPU_KV_CACHE_BYTES // (PAGE_BYTES * 2) * 16 * 1000
    arch = replace(ARCH, max_position_embeddings=length)
    config = EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=1))
    granted = make_worker(config, replace(CHECKPOINT, arch=arch)).determine_available_memory()
    assert granted > CPU_KV_CACHE_BYTES
    assert granted < 1000 * CPU_KV_CACHE_BYTES


def test_activations_grow_with_the_budget_and_the_number_of_requests() -> None:
    def bound(tokens: int, requests: int) -> int:
        scheduler = SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=requests)
        return activation_bytes(ARCH, EngineConfig(scheduler=scheduler), torch.float32)

    logits = 2 * VOCAB * 4
    assert bound(100, 10) - bound(100, 9) == logits
    # per token: 5 hidden states, q, k, v and the attention output, 4 of the feed-forward size
    assert bound(101, 10) - bound(100, 10) == 4 * (5 * 24 + 2 * 4 * 16 + 2 * 2 * 16 + 4 * 40)


def test_unknown_processor_is_refused_before_anything_loads() -> None:
    with pytest.raises(ConfigError, match="--logits-processors"):
        make_worker(EngineConfig(model=ModelConfig(logits_processors=("absent_module:Class",))))
