"""GGUF tensors: every block type bit by bit against the gguf package, and whole models against transformers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from serve.errors import ConfigError, ExitCode
from serve.models.weights.gguf import dequantize
from tests.checkpoints import VOCAB_SIZE, reference_greedy, reference_logits, write_gguf
from tests.models.harness import PagedRunner, divergence, load

Kind = gguf.GGMLQuantizationType
BLOCK_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# Where the float16 numbers of a block lie, so that random blocks hold finite ones.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
PROMPT = [(i * 37 + 11) % VOCAB_SIZE for i in range(40)]
# Rows of whole 32-element blocks; K-quants would need 256.
SIZES = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16, "intermediate_size": 128}


def random_blocks(name: str, count: int) -> np.ndarray:
    generator = np.random.default_rng(len(name) + count)
    _, num_bytes = gguf.GGML_QUANT_SIZES[Kind[name]]
    blocks = generator.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    for begin in HALVES[name]:
        scales = generator.normal(0, 0.1, count).astype(np.float16)
        blocks[:, begin : begin + 2] = scales[:, None].view(np.uint8)
    return blocks


@pytest.mark.parametrize("count", [1, 3, 1025, 9000])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_have_the_values_of_the_reference_bit_by_bit(name: str, count: int) -> None:
    blocks = random_blocks(name, count)
    expected = gguf.quants.dequantize(blocks, Kind[name]).reshape(-1)
    out = torch.full((expected.size,), float("nan"))
    dequantize(torch.from_numpy(blocks), name, out)
    assert np.array_equal(out.numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_are_rounded_from_float32(dtype: torch.dtype) -> None:
    blocks = random_blocks("Q4_K", 40)
    wide = torch.empty(40 * 256)
    dequantize(torch.from_numpy(blocks), "Q4_K", wide)
    out = torch.empty(40 * 256, dtype=dtype)
    dequantize(torch.from_numpy(blocks), "Q4_K", out)
    assert torch.equal(out, wide.to(dtype))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_model_from_gguf_equals_transformers_with_the_same_weights(tmp_path: Path, name: str) -> None:
    reference = write_gguf(tmp_path / "m.gguf", "llama", kind=Kind[name], **SIZES)
    actual = PagedRunner(load(tmp_path / "m.gguf")).prefill(PROMPT)
    expected = reference_logits(reference, PROMPT)
    # Quantised weights are multiplied with activations of 16 bits.
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4 if name.endswith(("16", "32")) else 2e-2)
    assert divergence(expected, actual) < 1e-6


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_each_family_from_gguf_continues_as_transformers(tmp_path: Path, family: str) -> None:
    reference = write_gguf(tmp_path / "m.gguf", family, kind=Kind.Q8_0, **SIZES)
    assert PagedRunner(load(tmp_path / "m.gguf")).generate(PROMPT, 20) == reference_greedy(reference, PROMPT, 20)


def test_tied_head_and_biases_of_the_interleaved_heads_are_read(tmp_path: Path) -> None:
    reference = write_gguf(tmp_path / "m.gguf", "llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    actual = PagedRunner(load(tmp_path / "m.gguf")).prefill(PROMPT)
    torch.testing.assert_close(actual, reference_logits(reference, PROMPT), rtol=0, atol=1e-4)


def test_file_cut_inside_the_tensors_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[: len(whole) - 2000])
    with pytest.raises(ConfigError, match="the file is truncated, fetch it again") as caught:
        load(tmp_path / "m.gguf")
    assert caught.value.exit_code == ExitCode.MODEL


def test_divisors_of_rotary_frequencies_are_applied_and_checked(tmp_path: Path) -> None:
    write_gguf(tmp_path / "plain.gguf", "llama")
    write_gguf(tmp_path / "ones.gguf", "llama", rope_divisors=[1.0] * 6)
    write_gguf(tmp_path / "twos.gguf", "llama", rope_divisors=[2.0] * 6)
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    reference = write_gguf(tmp_path / "linear.gguf", "llama", rope_parameters=linear)
    plain = PagedRunner(load(tmp_path / "plain.gguf")).prefill(PROMPT)
    assert torch.equal(PagedRunner(load(tmp_path / "ones.gguf")).prefill(PROMPT), plain)
    actual = PagedRunner(load(tmp_path / "twos.gguf")).prefill(PROMPT)
    torch.testing.assert_close(actual, reference_logits(reference, PROMPT), rtol=0, atol=1e-4)
    write_gguf(tmp_path / "short.gguf", "llama", rope_divisors=[1.0] * 5)
    with pytest.raises(ConfigError, match="divisors of rotary frequencies"):
        load(tmp_path / "short.gguf")


@pytest.mark.parametrize(("kind", "has_effect"), [("F16", False), ("Q4_0", True)])
def test_int8_activations_that_have_no_effect_are_said_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, has_effect: bool
) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", kind=Kind[kind], **SIZES)
    load(tmp_path / "m.gguf", cpu_activations="int8")
    assert ("--cpu-activations int8 has no effect" in caplog.text) is not has_effect
