"""What config.json says of quantised weights: each method's own words, and a refusal of what is not supported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.checkpoint import Quantization, WeightScheme, load_checkpoint
from serve.errors import ConfigError, ExitCode

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def compressed(weights: dict[str, object] | None = None, **changes: object) -> dict[str, object]:
    group: dict[str, object] = {"targets": ["Linear"], "weights": WEIGHTS | (weights or {})}
    content: dict[str, object] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return content | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]} | changes


def read(folder: Path, entry: object, *, key: str = "quantization_config") -> Quantization | None:
    (folder / "config.json").write_text(json.dumps(LLAMA | ({} if entry is None else {key: entry})))
    return load_checkpoint(folder, need_weights=False).quantization


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (AWQ, Quantization("awq", (WeightScheme(4, 128),))),
        (AWQ | {"version": "GEMM", "group_size": -1}, Quantization("awq", (WeightScheme(4, 0),))),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "backend": "autoawq"},
            Quantization("awq", (WeightScheme(4, 64),)),
        ),
        (GPTQ, Quantization("gptq", (WeightScheme(4, 64),), zero_shift=1)),
        (GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, Quantization("gptq", (WeightScheme(8, 64),))),
        (GPTQ | {"dynamic": {"-:.*lm_head": {}}}, Quantization("gptq", (WeightScheme(4, 64),), zero_shift=1)),
        (compressed(), Quantization("compressed-tensors", (WeightScheme(4, 32),))),
        (
            compressed({"num_bits": 8, "strategy": "channel", "group_size": None}, format="int-quantized"),
            Quantization("compressed-tensors", (WeightScheme(8, 0),)),
        ),
        (
            compressed(
                format="mixed-precision",
                config_groups={
                    "a": {"weights": WEIGHTS, "format": "pack-quantized"},
                    "b": {
                        "weights": {"num_bits": 8},
                        "format": "int-quantized",
                        "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
                    },
                },
            ),
            Quantization("compressed-tensors", (WeightScheme(4, 32), WeightScheme(8, 0)), activations="int8"),
        ),
    ],
)
def test_each_method_is_read(tmp_path: Path, entry: dict[str, object], expected: Quantization) -> None:
    assert read(tmp_path, entry) == expected


def test_plain_folders_have_none(tmp_path: Path) -> None:
    assert read(tmp_path, None) is None


def test_older_places_of_the_description_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, compressed(), key="compression_config") == read(tmp_path, compressed())
    for file, entry in (("quantize_config.json", GPTQ), ("quant_config.json", AWQ)):
        folder = tmp_path / file.removesuffix(".json")
        folder.mkdir()
        (folder / file).write_text(json.dumps({key: value for key, value in entry.items() if key != "quant_method"}))
        assert read(folder, None) == read(tmp_path, entry)


def test_description_names_every_scheme() -> None:
    quantization = Quantization("compressed-tensors", (WeightScheme(4, 32), WeightScheme(8, 0)))
    assert quantization.description == "compressed-tensors (4 bits, groups of 32; 8 bits, a scale an output)"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantisation method 'bitsandbytes' is not supported"),
        ({"quant_method": "fp8"}, "quantisation method 'fp8' is not supported"),
        ({"quant_method": "mxfp4"}, "quantisation method 'mxfp4' is not supported"),
        ({"bits": 4}, "a quantisation without quant_method is not supported"),
        (AWQ | {"version": "gemv"}, "awq version 'gemv' is not supported"),
        (AWQ | {"version": "marlin"}, "awq version 'marlin' is not supported"),
        (AWQ | {"backend": "llm-awq"}, "awq backend 'llm-awq' is not supported"),
        (AWQ | {"bits": 8}, "awq weights of 8 bits are not supported"),
        (AWQ | {"bits": None}, "w_bit is missing"),
        (AWQ | {"group_size": "all"}, "group_size is 'all'"),
        (GPTQ | {"bits": 3}, "gptq weights of 3 bits are not supported"),
        (GPTQ | {"bits": 2}, "gptq weights of 2 bits are not supported"),
        (GPTQ | {"bits": 0}, "bits is 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq checkpoint_format 'marlin' is not supported"),
        (GPTQ | {"is_marlin_format": True}, "gptq checkpoint_format 'marlin' is not supported"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "gptq settings for single modules (dynamic: '+:.*down.*')"),
        (compressed(format="float-quantized"), "compressed-tensors format 'float-quantized' is not supported"),
        (compressed(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not supported"),
        (compressed(format="marlin-24"), "compressed-tensors format 'marlin-24' is not supported"),
        (compressed({"type": "float", "num_bits": 8}), "compressed-tensors weights of type float8 are not supported"),
        (compressed({"num_bits": 3}), "compressed-tensors weights of type int3 are not supported"),
        (compressed({"strategy": "block"}), "compressed-tensors weights with strategy 'block' are not supported"),
        (compressed({"group_size": None}), "group_size is missing"),
        (compressed(config_groups={}), "compressed-tensors without config_groups"),
        (compressed(config_groups={"a": {"targets": []}}), "compressed-tensors group 'a' without weights"),
        (compressed(config_groups={"a": 1}), "a is not an object"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity format 'sparse-24-bitmask'"),
        (compressed(transform_config={"config_groups": {}}), "compressed-tensors with a transform_config"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, entry: object, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, entry)
    assert caught.value.exit_code == ExitCode.MODEL
    assert problem in str(caught.value)
    assert "config.json" in str(caught.value)


def test_refusal_says_what_is_supported_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, {"quant_method": "fp8"})
    message = str(caught.value)
    assert "supported: awq (version gemm, 4 bits), gptq (4 and 8 bits), compressed-tensors" in message
    assert "take a checkpoint of a supported kind, or the unquantised model" in message
