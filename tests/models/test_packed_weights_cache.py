"""A model computes the same, bit by bit, whether its packed weights are packed, just stored, or mapped."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from serve.checkpoint import load_checkpoint
from serve.config import ModelConfig, read_environment
from serve.kernels.packed_weight import PackedWeight
from serve.kernels.quantized_weight import QuantizedWeight
from serve.model_store import resolve_model
from serve.models.llama import build_llama, parameter_shapes
from serve.models.registry import CausalLM, load_model
from serve.models.weights.loader import ParameterLoader, open_weights
from serve.models.weights.packed_cache import CacheEntry, PackedWeightsCache
from tests.checkpoints import write_checkpoint
from tests.models.harness import CPU, PagedRunner

PROMPT = [504, 3575, 282, 4649, 314]


def wait_until_stored() -> None:
    """Wait for the thread that stores what a load packed."""
    for thread in threading.enumerate():
        if thread.name == "packed-weights":
            thread.join(60)


def outcome(model: CausalLM) -> tuple[torch.Tensor, list[int]]:
    runner = PagedRunner(model, num_blocks=8)
    return runner.prefill(PROMPT), runner.generate(PROMPT, 12)


def test_the_built_in_model_gives_the_same_logits_and_tokens_from_the_cache(
    built_in_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = resolve_model(built_in_model, None, read_environment())
    config = ModelConfig(model=str(path), max_model_len=64)

    def load(folder: Path | None) -> CausalLM:
        checkpoint = load_checkpoint(path)
        return load_model(checkpoint, config, dtype=torch.float32, device=CPU, cache_folder=folder)

    logits, tokens = outcome(load(None))
    cold = outcome(load(tmp_path))
    wait_until_stored()
    assert "mapped" not in caplog.text
    warm = outcome(load(tmp_path))
    assert "packed weights: mapped" in caplog.text
    assert torch.equal(cold[0], logits)
    assert torch.equal(warm[0], logits)
    assert cold[1] == warm[1] == tokens


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_floats_gives_the_same_logits_from_the_cache(tmp_path: Path, tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    checkpoint = load_checkpoint(folder)
    cache = PackedWeightsCache(tmp_path / "packed", 1 << 30, min_free_bytes=0)

    def load(entry: CacheEntry | None) -> CausalLM:
        source = open_weights(checkpoint, parameter_shapes(checkpoint.arch), dummy_seed=None)
        with ParameterLoader(source, dtype=torch.float32, device=CPU, cache=entry) as loader:
            return build_llama(checkpoint.arch, loader, 64)

    prompt = [5, 17, 300, 42]
    logits = PagedRunner(load(None)).prefill(prompt)
    cold = load(CacheEntry(cache, "key", lambda: "key"))
    wait_until_stored()
    entry = CacheEntry(cache, "key", lambda: "key")
    # Seven matrices a layer in four products, and the head.
    found = entry.take(
        "model.layers.0.self_attn.q_proj.weight+model.layers.0.self_attn.k_proj.weight"
        "+model.layers.0.self_attn.v_proj.weight"
    )
    assert found is not None
    assert isinstance(found[0], PackedWeight)
    assert torch.equal(PagedRunner(cold).prefill(prompt), logits)
    assert torch.equal(PagedRunner(load(entry)).prefill(prompt), logits)


def test_matrices_of_another_kind_are_packed_anew(tmp_path: Path) -> None:
    """The key covers the code that chooses the kind; should it fail, the kind itself is looked at."""
    checkpoint = load_checkpoint(write_checkpoint(tmp_path / "model"))
    source = open_weights(checkpoint, parameter_shapes(checkpoint.arch), dummy_seed=None)
    cache = PackedWeightsCache(tmp_path / "packed", 1 << 30, min_free_bytes=0)
    name = "model.layers.0.mlp.down_proj.weight"
    cache.store("key", {name: (QuantizedWeight(torch.zeros(1, 1, 640, dtype=torch.uint8), "Q4_1", 16, 32),)})
    with ParameterLoader(source, dtype=torch.float32, device=CPU, cache=CacheEntry(cache, "key", lambda: "")) as loader:
        packed = loader.packed(name)
    assert packed is not None
    plain = torch.empty(source.shapes[name])
    source.read(name, plain)
    assert torch.equal(packed.plain(), plain)
