"""AWQ, GPTQ and compressed-tensors checkpoints: the logits of transformers on the values that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.checkpoint import load_checkpoint
from serve.errors import ConfigError, ExitCode
from tests.checkpoints import VOCAB_SIZE, reference_greedy, reference_logits
from tests.models.harness import PagedRunner, divergence, load
from tests.quantized_checkpoints import Settings, write_quantized

PROMPT = [(i * 37 + 11) % VOCAB_SIZE for i in range(24)]
CASES = [
    ("awq", Settings(group=32)),
    ("awq", Settings(group=64)),
    ("awq", Settings(group=128)),
    ("awq", Settings(group=0)),
    ("awq", Settings(group=64, symmetric=True)),
    ("gptq", Settings(group=32)),
    ("gptq", Settings(group=64, symmetric=True)),
    ("gptq", Settings(group=128)),
    ("gptq", Settings(group=0, symmetric=True)),
    ("gptq", Settings(group=32, mixes_inputs=True)),
    ("gptq", Settings(group=32, mixes_inputs=True, symmetric=True, bits=8)),
    ("gptq", Settings(group=128, bits=8)),
    ("gptq_v2", Settings(group=32)),
    ("gptq_v2", Settings(group=64, mixes_inputs=True)),
    ("pack-quantized", Settings(group=32, symmetric=True)),
    ("pack-quantized", Settings(group=128)),
    ("pack-quantized", Settings(group=0, symmetric=True, scale_type=torch.bfloat16)),
    ("pack-quantized", Settings(group=64, mixes_inputs=True)),
    ("pack-quantized", Settings(group=0, bits=8)),
    ("pack-quantized", Settings(group=128, bits=8, symmetric=True, scale_type=torch.float32)),
    ("int-quantized", Settings(group=0, bits=8, symmetric=True)),
    ("int-quantized", Settings(group=0, bits=8)),
    ("int-quantized", Settings(group=64, bits=8, symmetric=True, scale_type=torch.bfloat16)),
]


def name_of(case: object) -> str:
    if not isinstance(case, Settings):
        return str(case)
    marks = ("-symmetric" if case.symmetric else "") + ("-mixed" if case.mixes_inputs else "")
    return f"{case.bits}bits-{case.group}{marks}-{str(case.scale_type).removeprefix('torch.')}"


def assert_equals_reference(folder: Path, model: torch.nn.Module) -> None:
    actual = PagedRunner(load(folder)).prefill(PROMPT)
    expected = reference_logits(model, PROMPT)
    # Quantised weights are multiplied with activations of 16 bits.
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-2)
    assert divergence(expected, actual) < 1e-6


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=name_of)
def test_logits_equal_transformers_on_the_values_of_the_codes(tmp_path: Path, kind: str, settings: Settings) -> None:
    assert_equals_reference(tmp_path, write_quantized(tmp_path, kind, settings))


@pytest.mark.parametrize("kind", ["awq", "gptq", "pack-quantized"])
def test_biases_stay_beside_packed_matrices(tmp_path: Path, kind: str) -> None:
    model = write_quantized(tmp_path, kind, family="qwen2")
    assert PagedRunner(load(tmp_path)).generate(PROMPT, 12) == reference_greedy(model, PROMPT, 12)


def test_tied_embeddings_and_norms_of_heads_stay_plain(tmp_path: Path) -> None:
    model = write_quantized(tmp_path, "gptq", family="qwen3", tie_word_embeddings=True)
    assert_equals_reference(tmp_path, model)


@pytest.mark.parametrize("kind", ["awq", "gptq", "pack-quantized", "int-quantized"])
def test_single_matrices_may_be_left_unquantised(tmp_path: Path, kind: str) -> None:
    settings = Settings(group=32, bits=8 if kind == "int-quantized" else 4)
    model = write_quantized(tmp_path, kind, settings, keeps=lambda name: "layers.0.mlp" in name or "k_proj" in name)
    assert_equals_reference(tmp_path, model)


@pytest.mark.parametrize("kind", ["awq", "gptq", "pack-quantized", "int-quantized"])
def test_matrices_whose_groups_fit_no_tile_are_kept_as_floats(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    # The down projection has 200 inputs: no whole groups of 32.
    settings = Settings(group=0, bits=8 if kind == "int-quantized" else 4)
    model = write_quantized(tmp_path, kind, settings, intermediate_size=200)
    with caplog.at_level("WARNING"):
        assert_equals_reference(tmp_path, model)
    assert "mlp.down_proj and maybe others" in caplog.text
    assert caplog.text.count("fit no tile") == 1


def test_odd_numbers_of_outputs_are_read(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 36, "hidden_size": 64}
    for kind in ("pack-quantized", "int-quantized"):
        settings = Settings(group=0, bits=8 if kind == "int-quantized" else 4, symmetric=True)
        model = write_quantized(tmp_path / kind, kind, settings, intermediate_size=97, **sizes)
        assert_equals_reference(tmp_path / kind, model)


def test_old_name_of_a_gptq_description_is_read(tmp_path: Path) -> None:
    model = write_quantized(tmp_path, "gptq")
    content = json.loads((tmp_path / "config.json").read_text())
    description = content.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "quantize_config.json").write_text(json.dumps(description | {"quant_method": None}))
    assert_equals_reference(tmp_path, model)


def test_matrices_of_two_widths_are_told_apart(tmp_path: Path) -> None:
    four, eight = Settings(group=32, symmetric=True), Settings(group=64, bits=8)
    model = write_quantized(tmp_path / "four", "pack-quantized", four)
    other = write_quantized(tmp_path / "eight", "pack-quantized", eight)
    tensors = load_file(tmp_path / "four" / "model.safetensors")
    wide = load_file(tmp_path / "eight" / "model.safetensors")
    is_wide = {name: "down_proj" in name for name in [*tensors, *wide]}
    mixed = {name: tensor for name, tensor in tensors.items() if not is_wide[name]}
    mixed |= {name: tensor for name, tensor in wide.items() if is_wide[name]}
    save_file(mixed, tmp_path / "four" / "model.safetensors")
    content = json.loads((tmp_path / "four" / "config.json").read_text())
    second = json.loads((tmp_path / "eight" / "config.json").read_text())["quantization_config"]["config_groups"]
    content["quantization_config"]["config_groups"]["group_1"] = second["group_0"]
    (tmp_path / "four" / "config.json").write_text(json.dumps(content))
    with torch.no_grad():
        for mine, theirs in zip(model.model.layers, other.model.layers, strict=True):
            mine.mlp.down_proj.weight.copy_(theirs.mlp.down_proj.weight)
    assert_equals_reference(tmp_path / "four", model)


def test_empty_biases_that_some_writers_add_are_dropped_and_others_refused(tmp_path: Path) -> None:
    model = write_quantized(tmp_path, "gptq")
    path = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.down_proj.bias"
    save_file(load_file(path) | {name: torch.zeros(128, dtype=torch.float16)}, path)
    assert_equals_reference(tmp_path, model)
    save_file(load_file(path) | {name: torch.ones(128, dtype=torch.float16)}, path)
    assert f"1 tensors that the architecture does not: {name}" in refusal(tmp_path)


def test_scales_of_a_rounded_cache_and_of_activations_are_left_out(tmp_path: Path) -> None:
    model = write_quantized(tmp_path, "int-quantized", Settings(group=0, bits=8, symmetric=True))
    path = tmp_path / "model.safetensors"
    attention = "model.layers.1.self_attn"
    extra = {f"{attention}.{part}": torch.ones(1) for part in ("k_scale", "v_scale", "q_proj.input_scale")}
    save_file(load_file(path) | extra, path)
    assert_equals_reference(tmp_path, model)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert caught.value.exit_code == ExitCode.MODEL
    return str(caught.value)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A checkpoint of each kind with groups of 32."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("awq", "gptq", "pack-quantized", "int-quantized")}
    for kind, folder in folders.items():
        write_quantized(folder, kind, Settings(group=32, bits=8 if kind == "int-quantized" else 4))
    return folders


STEM = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("kind", "part", "tensor", "problem"),
    [
        ("awq", "qzeros", None, "tensor qzeros is missing"),
        ("awq", "scales", None, "tensor scales is missing"),
        ("awq", "scales", torch.ones(3, 24), "tensor scales is float32 [3, 24], expected float16 or bfloat16"),
        ("awq", "qzeros", torch.zeros(4, 2, dtype=torch.int32), "tensor qzeros is int32 [4, 2], expected int32 [4, 3]"),
        ("awq", "qweight", torch.zeros(128, 2, dtype=torch.int32), f"{STEM}.weight is [16, 128], expected [24, 128]"),
        ("awq", "qweight", torch.zeros(128, 3, dtype=torch.int64), "tensor qweight is int64 [128, 3], expected int32"),
        ("awq", "qweight", None, f"tensor '{STEM}.qzeros' of type int32 belongs to no matrix"),
        ("gptq", "scales", torch.ones(4, 24, dtype=torch.int32), "tensor scales is int32 [4, 24], expected float16"),
        ("gptq", "qzeros", None, "tensor qzeros is missing"),
        ("gptq", "g_idx", torch.zeros(127, dtype=torch.int32), "tensor g_idx is int32 [127], expected int32 or"),
        ("gptq", "g_idx", torch.full((128,), 4, dtype=torch.int32), "groups from 4 to 4 where there are 4"),
        ("gptq", "g_idx", torch.full((128,), -1, dtype=torch.int32), "groups from -1 to -1 where there are 4"),
        ("gptq", "qweight", torch.zeros(15, 24, dtype=torch.int32), f"{STEM}.weight is [24, 120], expected [24, 128]"),
        ("gptq", "qweight", torch.zeros(0, 24, dtype=torch.int32), f"{STEM}.weight is [24, 0], expected [24, 128]"),
        ("pack-quantized", "weight_shape", None, "tensor weight_shape is missing"),
        ("pack-quantized", "weight_shape", torch.tensor([24, 1 << 40]), "fit weight_shape [24, 1099511627776]"),
        ("pack-quantized", "weight_shape", torch.tensor([24, 0]), "does not fit weight_shape [24, 0]"),
        ("pack-quantized", "weight_scale", None, "tensor weight_scale is missing"),
        ("pack-quantized", "weight_scale", torch.ones(24, 5), "tensor weight_scale [24, 5] fits no group size"),
        ("pack-quantized", "weight_scale", torch.ones(24, 4, dtype=torch.int8), "is int8, expected a floating type"),
        ("pack-quantized", "weight_zero_point", torch.zeros(24, 3, dtype=torch.int8), "expected int8 [24, 4]"),
        ("int-quantized", "weight_scale", None, "tensor weight_scale is missing"),
        ("int-quantized", "weight", torch.zeros(24, 64, dtype=torch.int8), "is [24, 64], expected [24, 128]"),
        ("int-quantized", "weight", torch.zeros(24, 128, dtype=torch.int32), f"'{STEM}.weight' of type int32 belongs"),
    ],
)  # fmt: skip
def test_tensor_that_lacks_or_does_not_fit_is_named(
    tmp_path: Path, written: Mapping[str, Path], kind: str, part: str, tensor: torch.Tensor | None, problem: str
) -> None:
    shutil.copy(written[kind] / "config.json", tmp_path)
    tensors = load_file(written[kind] / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if name != f"{STEM}.{part}"}
    tensors |= {} if tensor is None else {f"{STEM}.{part}": tensor}
    save_file(tensors, tmp_path / "model.safetensors")
    assert problem in refusal(tmp_path)


def test_plain_weights_under_a_quantised_description_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq", keeps=lambda name: True)
    assert "the files hold no such tensor; fetch them again, or remove the entry" in refusal(tmp_path)


def test_checkpoint_tells_its_quantisation(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq", Settings(group=64))
    quantization = load_checkpoint(tmp_path).quantization
    assert quantization is not None
    assert quantization.description == "gptq (4 bits, groups of 64)"
