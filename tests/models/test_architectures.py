"""Every supported architecture and option against transformers in float32, over the paged cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from serve.checkpoint import FAMILIES as CHECKPOINT_FAMILIES
from serve.checkpoint import load_checkpoint
from serve.config import ModelConfig
from serve.errors import ConfigError, ExitCode
from serve.kernels import ops
from serve.models.registry import BUILDERS, compute_dtype, dtype_description, load_model, weight_dtype
from tests.checkpoints import VOCAB_SIZE, load_reference, reference_greedy, reference_logits, write_checkpoint
from tests.models.harness import CPU, PagedRunner, load

TOLERANCE = 1e-4
PROMPT = [(i * 37 + 11) % VOCAB_SIZE for i in range(75)]

CASES = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with tied head": ("llama", {"tie_word_embeddings": True}),
    "llama with one kv head": ("llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "mistral": ("mistral", {}),
    "mistral with window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with window in later layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 18, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3 with window in one layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 18,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}),
    "dynamic rope": (
        "llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn rope": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}


def prompt_for(case: str) -> list[int]:
    # Beyond the original length transformers turns a whole dynamic prompt by its last token's base; see test_rope.
    return PROMPT[:60] if case == "dynamic rope" else PROMPT


@pytest.mark.parametrize("case", CASES)
def test_prefill_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    folder = write_checkpoint(tmp_path / "model", family, **changes)
    prompt = prompt_for(case)
    expected = reference_logits(load_reference(folder), prompt)
    actual = PagedRunner(load(folder)).prefill(prompt)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", ["llama with biases", "mistral with window", "qwen2", "qwen3", "yarn rope"])
def test_64_greedy_tokens_equal_transformers(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    folder = write_checkpoint(tmp_path / "model", family, seed=1, **changes)
    expected = reference_greedy(load_reference(folder), PROMPT[:30], 64)
    assert PagedRunner(load(folder)).generate(PROMPT[:30], 64) == expected


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the bit with the CPU library, as it promises; torch's own products depend on the batch a little."""
    if ops.packs("cpu", torch.float32):
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["llama", "mistral with window", "qwen3 with window in one layer"])
def test_prompt_in_chunks_gives_the_logits_of_the_whole(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    model = load(write_checkpoint(tmp_path / "model", family, **changes))
    whole = PagedRunner(model).prefill(PROMPT)
    runner = PagedRunner(model)
    chunks = [runner.step({"r": PROMPT[first:last]})["r"] for first, last in ((0, 16), (16, 17), (17, 50), (50, 75))]
    assert_same(torch.cat(chunks), whole)


def test_requests_in_one_batch_do_not_see_each_other(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path / "model", "qwen2"))
    prompts = {"a": PROMPT[:1], "b": PROMPT[1:40], "c": PROMPT[40:57], "d": PROMPT[20:75]}
    runner = PagedRunner(model)
    together = runner.step(prompts)
    further = runner.step({"d": [5], "b": [6], "a": [7, 8, 9]})
    for name, prompt in prompts.items():
        alone = PagedRunner(model)
        assert_same(together[name], alone.prefill(prompt))
        if name in further:
            more = {"d": [5], "b": [6], "a": [7, 8, 9]}[name]
            assert_same(further[name], alone.prefill(more))


HALF_CASES = ["llama with biases", "llama with tied head", "mistral with window", "qwen2", "qwen2 tied", "qwen3"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", HALF_CASES)
def test_half_precision_checkpoint_equals_transformers_in_float32(
    tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    family, changes = CASES[case]
    folder = write_checkpoint(tmp_path / "model", family, dtype=dtype, **changes)
    expected = reference_logits(load_reference(folder), PROMPT)
    torch.testing.assert_close(PagedRunner(load(folder)).prefill(PROMPT), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "qwen2 tied"])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_dtype_rounds_weights_and_nothing_else(tmp_path: Path, case: str, name: str) -> None:
    family, changes = CASES[case]
    folder = write_checkpoint(tmp_path / "model", family, **changes)
    reference = load_reference(folder).to(getattr(torch, name)).float()
    # Not a parameter: transformers computes it anew where it loads a model.
    reference.model.rotary_emb.inv_freq = load_reference(folder).model.rotary_emb.inv_freq
    actual = PagedRunner(load(folder, dtype=name)).prefill(PROMPT)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, reference_logits(reference, PROMPT), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", ["llama with biases", "qwen2 tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoint_gives_the_bits_of_its_float32_copy(
    tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    family, changes = CASES[case]
    folder = write_checkpoint(tmp_path / "model", family, dtype=dtype, **changes)
    exact = PagedRunner(load(folder, dtype="float32")).prefill(PROMPT)
    assert_same(PagedRunner(load(folder)).prefill(PROMPT), exact)


def test_config_in_the_older_spelling_gives_the_same_logits(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    folder = write_checkpoint(tmp_path / "model", "llama", rope_parameters=rope)
    expected = PagedRunner(load(folder)).prefill(PROMPT)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(PagedRunner(load(folder)).prefill(PROMPT), expected)


def test_model_describes_its_cache(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path / "a", "mistral"))
    assert (model.num_layers, model.num_kv_heads, model.head_size) == (3, 2, 12)


def dummy_logits(folder: Path, seed: int) -> torch.Tensor:
    checkpoint = load_checkpoint(folder, need_weights=False)
    config = ModelConfig(model=str(folder), load_format="dummy", seed=seed)
    return PagedRunner(load_model(checkpoint, config, dtype=torch.float32, device=CPU)).prefill(PROMPT)


def test_dummy_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen3")
    (folder / "model.safetensors").unlink()
    first = dummy_logits(folder, 3)
    assert first.isfinite().all()
    assert first.std() > 0
    assert torch.equal(first, dummy_logits(folder, 3))
    assert not torch.equal(first, dummy_logits(folder, 4))


def test_every_family_of_checkpoints_has_a_builder() -> None:
    assert set(BUILDERS) == set(CHECKPOINT_FAMILIES)


def test_activations_are_float32_on_the_cpu_and_of_the_files_own_type_on_a_gpu(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_checkpoint(tmp_path / "model", "llama", dtype=torch.float16))
    gpu = torch.device("cuda")
    assert [compute_dtype(name, checkpoint, CPU) for name in ("auto", "bfloat16")] == [torch.float32, torch.float32]
    assert [compute_dtype(name, checkpoint, gpu) for name in ("auto", "bfloat16")] == [torch.float16, torch.bfloat16]
    assert [weight_dtype(name) for name in ("auto", "bfloat16")] == [None, torch.bfloat16]


def test_description_of_types_names_the_weights_where_they_differ(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_checkpoint(tmp_path / "model", "llama", dtype=torch.float16))
    names = [dtype_description(name, checkpoint, CPU) for name in ("auto", "float32", "bfloat16")]
    assert names == ["float32 (weights float16)", "float32", "float32 (weights bfloat16)"]


def test_context_too_long_for_a_rotary_table_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama", max_position_embeddings=1 << 30)
    with pytest.raises(ConfigError, match="set a smaller --max-model-len") as caught:
        load(folder)
    assert caught.value.exit_code == ExitCode.RESOURCES
    assert load(folder, max_model_len=100).num_layers == 3
