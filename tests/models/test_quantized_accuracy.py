"""How far products with quantised weights are from float32 on the same weights: divergence, first choices, perplexity.

The text is the first 1,000 tokens of the repository's licence; `make test-kl` takes all of them and every type, other
runs 128 and the types that differ in how they are computed.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from serve.checkpoint import load_checkpoint
from serve.checkpoint.arch import ModelArch
from serve.config import read_environment
from serve.kernels.quantized_weight import QuantizedBlocks
from serve.model_store import resolve_model
from serve.models.llama import build_llama
from serve.models.registry import CausalLM
from serve.models.weights.loader import ParameterLoader
from serve.renderers.tokenizer import load_tokenizer
from tests.checkpoints import load_gguf_reference, reference_logits
from tests.models.harness import CPU, PagedRunner, divergence, load

Kind = gguf.GGMLQuantizationType
IS_FULL = "SERVE_TEST_KL" in os.environ
NUM_TOKENS = 1000 if IS_FULL else 128
# The built-in model's own (Q4_1 and a Q8_0 head), and its weights rounded again to types that the gguf package makes.
TYPES = ["own", "Q4_0", "Q5_0", "Q5_1", "Q8_0"] if IS_FULL else ["own", "Q5_0"]
# Blocks of 256 inputs do not fit its 576: a small model of random blocks, with factors that make weights of usual size.
SUPER_TYPES = {"Q2_K": 3e-3, "Q3_K": 1e-3, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 3e-5}
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
# What float32 sums in another order lose is of this size too.
EXACT_LIMIT = 1e-6
# llama.cpp's 8 bits: 3.5e-3 on the built-in model, where a few channels are much larger than the others.
INT8_LIMIT = 1e-2


@dataclass
class BlockSource:
    """A transformers model's parameters, matrices as blocks of one type."""

    parameters: Mapping[str, torch.Tensor]
    matrices: Mapping[str, QuantizedBlocks]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors there are."""
        return {name: tuple(tensor.shape) for name, tensor in self.parameters.items()}

    def read(self, name: str, out: torch.Tensor) -> None:
        """Write a tensor to out."""
        out.copy_(self.parameters[name])

    def mapped(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """No memory of a file."""
        return None

    def blocks(self, name: str) -> QuantizedBlocks | None:
        """Give a matrix's blocks."""
        return self.matrices.get(name)

    def dtype(self, name: str) -> torch.dtype:
        """Give the type of a tensor."""
        return torch.float32

    def rope_divisors(self) -> torch.Tensor | None:
        """None: frequencies are as usual."""
        return None


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def path(built_in_model: str) -> Path:
    return resolve_model(built_in_model, None, read_environment())


@pytest.fixture(scope="module")
def token_ids(path: Path) -> list[int]:
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    return list(load_tokenizer(load_checkpoint(path), None).encode(text, add_special_tokens=False))[:NUM_TOKENS]


@pytest.fixture(scope="module")
def hugging_face(path: Path) -> PreTrainedModel:
    return load_gguf_reference(path)


def perplexity(logits: torch.Tensor, token_ids: list[int]) -> float:
    targets = torch.tensor(token_ids[1:])
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), targets).exp())


def is_close(exact: torch.Tensor, actual: torch.Tensor, token_ids: list[int], *, int8: bool) -> bool:
    """Tell whether logits are as close as the form promises, and print by how much."""
    gap = divergence(exact, actual)
    same = float((exact.argmax(dim=1) == actual.argmax(dim=1)).float().mean())
    ratio = perplexity(actual, token_ids) / perplexity(exact, token_ids)
    figures = f"divergence {gap:.2e}, same first choice {same:.4f}, perplexity x {ratio:.6f}\n"
    sys.stdout.write(figures)  # which pytest shows with -s
    if int8:
        return gap < INT8_LIMIT and same >= 0.9 and abs(ratio - 1) < 3e-2
    return gap < EXACT_LIMIT and same >= 0.995 and abs(ratio - 1) < 5e-4


def with_blocks(
    model: PreTrainedModel, arch: ModelArch, blocks: Mapping[str, QuantizedBlocks], *, int8: bool
) -> CausalLM:
    """Give the model by our loader, its matrices as blocks, and write their values into transformers' own."""
    parameters = dict(model.named_parameters())
    for name, matrix in blocks.items():
        values = gguf.quants.dequantize(matrix.rows.numpy(), Kind[matrix.type_name])
        parameters[name].copy_(torch.from_numpy(values))
    source = BlockSource(parameters, blocks)
    with ParameterLoader(source, dtype=torch.float32, device=CPU, int8_activations=int8) as loader:
        return build_llama(arch, loader, 2048)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("type_name", TYPES)
def test_built_in_model_answers_as_float32_on_the_same_weights(
    hugging_face: PreTrainedModel, path: Path, token_ids: list[int], type_name: str, int8: bool
) -> None:
    if type_name == "own":
        model, reference = load(path, cpu_activations="int8" if int8 else "exact"), hugging_face
    else:
        reference = copy.deepcopy(hugging_face)
        blocks = {}
        for name, parameter in reference.named_parameters():
            if parameter.dim() == 2:
                rows = torch.from_numpy(gguf.quants.quantize(parameter.numpy(), Kind[type_name]))
                blocks[name] = QuantizedBlocks(rows, type_name, parameter.shape[1])
        model = with_blocks(reference, load_checkpoint(path).arch, blocks, int8=int8)
    exact = reference_logits(reference, token_ids)
    assert is_close(exact, PagedRunner(model).prefill(token_ids), token_ids, int8=int8)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("type_name", SUPER_TYPES)
def test_model_of_super_blocks_answers_as_float32_on_the_same_weights(
    path: Path, token_ids: list[int], type_name: str, int8: bool
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=49152, num_hidden_layers=2, tie_word_embeddings=True, **sizes)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    arch = small_arch(load_checkpoint(path).arch, config)
    generator = np.random.default_rng(1)
    blocks = {
        name: super_blocks(type_name, parameter.shape, generator)
        for name, parameter in reference.named_parameters()
        if parameter.dim() == 2
    }
    model = with_blocks(reference, arch, blocks, int8=int8)
    exact = reference_logits(reference, token_ids)
    assert is_close(exact, PagedRunner(model).prefill(token_ids), token_ids, int8=int8)


def super_blocks(type_name: str, shape: torch.Size, generator: np.random.Generator) -> QuantizedBlocks:
    """Make random blocks with finite factors."""
    num_out, num_in = shape
    _, num_bytes = gguf.GGML_QUANT_SIZES[Kind[type_name]]
    blocks = generator.integers(0, 256, (num_out * num_in // 256, num_bytes), dtype=np.uint8)
    for begin in HALVES[type_name]:
        factors = generator.uniform(0.5, 1.5, len(blocks)) * SUPER_TYPES[type_name]
        blocks[:, begin : begin + 2] = factors.astype(np.float16)[:, None].view(np.uint8)
    return QuantizedBlocks(torch.from_numpy(blocks.reshape(num_out, -1)), type_name, num_in)


def small_arch(arch: ModelArch, config: LlamaConfig) -> ModelArch:
    return replace(
        arch,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=10000.0,
    )
