"""Pooling models equal transformers: encoders, decoders, and the classifiers on both."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from serve.checkpoint import Checkpoint
from serve.checkpoint.runner import describe_model
from serve.config import EngineConfig, ModelConfig
from serve.errors import ConfigError
from serve.kernels.attention import AttentionMetadata, KVCache, select_backend
from serve.models.pooling import PoolingModel, StepInputs, decoder_parameter, encoder_parameter, load_pooling_model
from serve.pooling_params import PoolingParams
from tests.checkpoints import VOCAB_SIZE, write_gguf
from tests.pooling_checkpoints import build_pooling_reference, write_pooling_checkpoint

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PROMPTS = [[7], [5, 9, 11, 200, 17], list(range(30, 81)), [3] * 33]


def load(folder: Path, **settings: object) -> tuple[Checkpoint, PoolingModel]:
    config = EngineConfig(model=ModelConfig(model=str(folder), **settings))
    checkpoint, resolved = describe_model(folder, config)
    return checkpoint, load_pooling_model(checkpoint, resolved.model, dtype=torch.float32, device=CPU)


def hidden_states(
    checkpoint: Checkpoint, model: PoolingModel, prompts: list[list[int]], token_types: list[list[int]] | None = None
) -> list[Tensor]:
    """Run prompts side by side in one step; gives [num_tokens, hidden_size] for each."""
    arch, backend = checkpoint.arch, select_backend(CPU)
    lengths = [len(prompt) for prompt in prompts]
    width = -(-max(lengths) // BLOCK_SIZE)
    table = torch.arange(1, 1 + width * len(prompts), dtype=torch.int32).view(len(prompts), width)
    caches: list[KVCache] = []
    if arch.encoder is None:
        caches = [
            backend.allocate_kv_cache(
                1 + table.numel(),
                BLOCK_SIZE,
                num_kv_heads=arch.num_kv_heads,
                head_size=arch.head_size,
                dtype=torch.float32,
            )
            for _ in range(arch.num_layers)
        ]
    positions = torch.cat([torch.arange(length) for length in lengths])
    slots = [table[i, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, n in enumerate(lengths) for p in range(n)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    meta = AttentionMetadata(
        query_start_loc=starts.int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        num_reqs=len(prompts),
        num_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
    )
    types = torch.zeros_like(positions) if token_types is None else torch.tensor([*chain(*token_types)])
    ids = torch.tensor([*chain(*prompts)], dtype=torch.int32)
    with torch.inference_mode():
        hidden = model.forward(StepInputs(ids, positions, types, meta), caches)
    return list(hidden.split(lengths))


def pooled(model: PoolingModel, rows: Tensor, params: PoolingParams, *, chunk: int = 1000) -> Tensor:
    pool = model.pooler.start(params)
    for part in rows.split(chunk):
        pool.update(part)
    return model.pooler.finish(pool, params)


@torch.no_grad()
def reference_hidden(model: PreTrainedModel, prompt: list[int], token_types: list[int] | None = None) -> Tensor:
    """Give the last layer's output [num_tokens, hidden_size] by transformers."""
    kwargs = {} if token_types is None else {"token_type_ids": torch.tensor([token_types])}
    return model(torch.tensor([prompt]), **kwargs).last_hidden_state[0]


def reference_pooled(rows: Tensor, kind: str) -> Tensor:
    return {"cls": rows[0], "last": rows[-1], "mean": rows.mean(dim=0)}[kind]


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel", "XLMRobertaModel"])
def test_encoder_equals_transformers(tmp_path: Path, architecture: str) -> None:
    checkpoint, model = load(write_pooling_checkpoint(tmp_path, architecture))
    reference = build_pooling_reference(architecture)
    for rows, prompt in zip(hidden_states(checkpoint, model, PROMPTS), PROMPTS, strict=True):
        torch.testing.assert_close(rows, reference_hidden(reference, prompt), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("activation", ["gelu_new", "relu", "silu"])
def test_encoder_with_another_activation_equals_transformers(tmp_path: Path, activation: str) -> None:
    checkpoint, model = load(write_pooling_checkpoint(tmp_path, "BertModel", hidden_act=activation))
    reference = build_pooling_reference("BertModel", hidden_act=activation)
    (rows,) = hidden_states(checkpoint, model, [PROMPTS[2]])
    torch.testing.assert_close(rows, reference_hidden(reference, PROMPTS[2]), atol=2e-5, rtol=1e-4)


def test_second_text_of_a_pair_has_its_own_token_type(tmp_path: Path) -> None:
    checkpoint, model = load(write_pooling_checkpoint(tmp_path, "BertModel"))
    types = [0, 0, 1, 1, 1]
    (rows,) = hidden_states(checkpoint, model, [PROMPTS[1]], [types])
    expected = reference_hidden(build_pooling_reference("BertModel"), PROMPTS[1], types)
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-4)


def test_encoder_rows_do_not_depend_on_the_neighbours(tmp_path: Path) -> None:
    checkpoint, model = load(write_pooling_checkpoint(tmp_path, "BertModel"))
    together = hidden_states(checkpoint, model, PROMPTS)
    for rows, prompt in zip(together, PROMPTS, strict=True):
        (alone,) = hidden_states(checkpoint, model, [prompt])
        torch.testing.assert_close(rows, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("architecture", ["LlamaModel", "Qwen2Model", "Qwen3Model", "MistralModel"])
@pytest.mark.parametrize("kind", ["cls", "last", "mean"])
def test_decoder_embeddings_equal_transformers(tmp_path: Path, architecture: str, kind: str) -> None:
    checkpoint, model = load(write_pooling_checkpoint(tmp_path, architecture), pooler_config={"pooling_type": kind})
    reference = build_pooling_reference(architecture)
    for rows, prompt in zip(hidden_states(checkpoint, model, PROMPTS), PROMPTS, strict=True):
        expected = reference_pooled(reference_hidden(reference, prompt), kind)
        raw = pooled(model, rows, PoolingParams("embed", use_activation=False))
        torch.testing.assert_close(raw, expected, atol=1e-4, rtol=1e-4)
        unit = pooled(model, rows, PoolingParams("embed"))
        torch.testing.assert_close(unit, expected / expected.norm(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["cls", "last", "mean"])
@pytest.mark.parametrize("chunk", [1, 16, 20])
def test_pooling_in_chunks_equals_pooling_at_once(tmp_path: Path, kind: str, chunk: int) -> None:
    _, model = load(write_pooling_checkpoint(tmp_path, "LlamaModel"), pooler_config={"pooling_type": kind})
    rows = torch.randn(51, 48, generator=torch.Generator().manual_seed(3))
    for params in (PoolingParams("embed"), PoolingParams("token_embed")):
        torch.testing.assert_close(pooled(model, rows, params, chunk=chunk), pooled(model, rows, params))


def test_gguf_file_serves_as_an_embedding_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    reference = write_gguf(tmp_path / "m.gguf", **sizes).model
    checkpoint, model = load(tmp_path / "m.gguf", runner="pooling")
    (rows,) = hidden_states(checkpoint, model, [PROMPTS[2]])
    torch.testing.assert_close(rows, reference_hidden(reference, PROMPTS[2]), atol=1e-4, rtol=1e-4)


def test_generating_checkpoint_serves_as_an_embedding_model(tmp_path: Path) -> None:
    folder = write_pooling_checkpoint(tmp_path, "LlamaForCausalLM")
    checkpoint, model = load(folder, runner="pooling")
    (rows,) = hidden_states(checkpoint, model, [PROMPTS[2]])
    reference = build_pooling_reference("LlamaForCausalLM").model
    expected = reference_hidden(reference, PROMPTS[2])[-1]
    torch.testing.assert_close(pooled(model, rows, PoolingParams()), expected / expected.norm(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "num_labels", "activation"),
    [
        ("BertForSequenceClassification", 3, "softmax"),
        ("BertForSequenceClassification", 1, "sigmoid"),
        ("RobertaForSequenceClassification", 2, "softmax"),
        ("XLMRobertaForSequenceClassification", 1, "sigmoid"),
        ("LlamaForSequenceClassification", 4, "softmax"),
        ("Qwen2ForSequenceClassification", 1, "sigmoid"),
        ("Qwen3ForSequenceClassification", 2, "softmax"),
    ],
)
@torch.no_grad()
def test_class_scores_equal_transformers(tmp_path: Path, architecture: str, num_labels: int, activation: str) -> None:
    folder = write_pooling_checkpoint(tmp_path, architecture, num_labels=num_labels)
    checkpoint, model = load(folder)
    assert checkpoint.pooling is not None
    assert (checkpoint.pooling.task, checkpoint.pooling.activation) == ("classify", activation)
    reference = build_pooling_reference(architecture, num_labels=num_labels)
    for rows, prompt in zip(hidden_states(checkpoint, model, PROMPTS), PROMPTS, strict=True):
        logits = reference(torch.tensor([prompt])).logits[0]
        raw = pooled(model, rows, PoolingParams("classify", use_activation=False))
        torch.testing.assert_close(raw, logits, atol=2e-4, rtol=1e-4)
        probabilities = torch.sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, dim=-1)
        torch.testing.assert_close(pooled(model, rows, PoolingParams("classify")), probabilities, atol=1e-5, rtol=1e-4)


def test_dimensions_are_cut_before_the_length_becomes_one(tmp_path: Path) -> None:
    _, model = load(write_pooling_checkpoint(tmp_path, "LlamaModel", is_matryoshka=True))
    rows = torch.randn(4, 48, generator=torch.Generator().manual_seed(5))
    vector = pooled(model, rows, PoolingParams("embed", dimensions=8))
    torch.testing.assert_close(vector, rows[-1, :8] / rows[-1, :8].norm())


@pytest.mark.parametrize("architecture", ["BertModel", "XLMRobertaModel", "Qwen3Model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoint_equals_transformers_in_float32(
    tmp_path: Path, architecture: str, dtype: torch.dtype
) -> None:
    reference = build_pooling_reference(architecture).to(dtype)
    write_pooling_checkpoint(tmp_path, architecture)
    reference.save_pretrained(tmp_path)
    checkpoint, model = load(tmp_path)
    (rows,) = hidden_states(checkpoint, model, [PROMPTS[2]])
    assert rows.dtype == torch.float32
    exact = type(reference).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(rows, reference_hidden(exact, PROMPTS[2]), atol=1e-4, rtol=1e-4)


def test_names_of_tensors_with_a_prefix_or_of_old_exports_are_understood() -> None:
    assert encoder_parameter("bert.embeddings.LayerNorm.gamma") == "embeddings.LayerNorm.weight"
    assert encoder_parameter("encoder.layer.0.output.LayerNorm.beta") == "encoder.layer.0.output.LayerNorm.bias"
    assert encoder_parameter("roberta.encoder.layer.1.output.dense.weight") == "encoder.layer.1.output.dense.weight"
    assert encoder_parameter("classifier.weight") == "classifier.weight"
    assert decoder_parameter("layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert decoder_parameter("model.norm.weight") == "model.norm.weight"


def test_checkpoint_without_its_classifier_is_refused_with_the_missing_names(tmp_path: Path) -> None:
    folder = write_pooling_checkpoint(tmp_path, "LlamaModel")
    with pytest.raises(ConfigError, match=r"checkpoint lacks 1 of \d+ parameters: score\.weight"):
        load(folder, convert="classify")


def test_dummy_weights_give_a_model_of_the_same_shape(tmp_path: Path) -> None:
    checkpoint, model = load(write_pooling_checkpoint(tmp_path, "BertModel"), load_format="dummy")
    (rows,) = hidden_states(checkpoint, model, [[1, 2, VOCAB_SIZE - 1]])
    assert rows.shape == (3, 48)
    assert bool(torch.isfinite(rows).all())


def test_integer_buffers_of_old_exports_are_passed_over(tmp_path: Path) -> None:
    folder = write_pooling_checkpoint(tmp_path, "BertModel")
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.position_ids"] = torch.arange(96).unsqueeze(0)
    tensors["embeddings.token_type_ids"] = torch.zeros(1, 96, dtype=torch.int64)
    tensors["cls.predictions.bias"] = torch.zeros(VOCAB_SIZE)
    save_file(tensors, folder / "model.safetensors")
    checkpoint, model = load(folder)
    (rows,) = hidden_states(checkpoint, model, [PROMPTS[1]])
    expected = reference_hidden(build_pooling_reference("BertModel"), PROMPTS[1])
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-4)
