"""serve/checkpoint.py: config.json and GGUF headers become one ModelArch; what cannot be served is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest

from serve.checkpoint import Checkpoint, RopeScaling, load_checkpoint, sampling_defaults
from serve.errors import ConfigError, ExitCode
from serve.gguf import read_gguf_header

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "torch_dtype": "bfloat16",
}


def write_folder(folder: Path, config: dict[str, object], **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder: Path, config: dict[str, object], **files: object) -> Checkpoint:
    return load_checkpoint(write_folder(folder, config, **files))


def refusal(path: Path, *, need_weights: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(path, need_weights=need_weights)
    assert caught.value.exit_code == ExitCode.MODEL
    return str(caught.value)


def test_llama_config_becomes_an_arch(tmp_path: Path) -> None:
    arch = load(tmp_path, LLAMA).arch
    assert (arch.architecture, arch.num_heads, arch.num_kv_heads, arch.head_size) == ("LlamaForCausalLM", 4, 2, 16)
    assert (arch.vocab_size, arch.hidden_size, arch.intermediate_size, arch.num_layers) == (100, 64, 96, 4)
    assert (arch.rope_theta, arch.rms_norm_eps, arch.max_position_embeddings) == (50000.0, 1e-5, 2048)
    assert arch.checkpoint_dtype == "bfloat16"
    flags = (arch.qkv_bias, arch.o_bias, arch.mlp_bias, arch.qk_norm, arch.tie_word_embeddings)
    assert not any(flags)


def test_newer_files_keep_rope_values_in_rope_parameters(tmp_path: Path) -> None:
    config = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "torch_dtype")}
    config |= {"dtype": "float16", "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0}}
    arch = load(tmp_path, config).arch
    assert arch.rope_theta == 20000.0
    assert (arch.rope_scaling.kind, arch.rope_scaling.factor) == ("linear", 4.0)
    assert arch.checkpoint_dtype == "float16"


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": False}),
        ("LlamaForCausalLM", {"mlp_bias": True}, {"qkv_bias": False, "mlp_bias": True}),
        ("LlamaForCausalLM", {"sliding_window": 512}, {"sliding_window": None}),
        ("MistralForCausalLM", {"sliding_window": 512}, {"sliding_window": 512, "sliding_layers": ()}),
        ("MistralForCausalLM", {"sliding_window": None}, {"sliding_window": None}),
        ("MistralForCausalLM", {"head_dim": 24}, {"head_size": 24}),
        ("Qwen2ForCausalLM", {}, {"qkv_bias": True, "o_bias": False}),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": False}, {"sliding_window": None}),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2},
            {"sliding_window": 128, "sliding_layers": (2, 3)},
        ),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0},
            {"sliding_window": 128, "sliding_layers": ()},
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 128,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
            },
            {"sliding_window": 128, "sliding_layers": (1,)},
        ),
        ("Qwen3ForCausalLM", {}, {"qk_norm": True, "head_size": 128, "qkv_bias": False}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    ],
)
def test_families_differ_as_their_definitions_say(
    tmp_path: Path, architecture: str, changes: dict[str, object], expected: dict[str, object]
) -> None:
    arch = load(tmp_path, LLAMA | {"architectures": [architecture]} | changes).arch
    values = {name: value for name, value in vars_of(arch).items() if name in expected}
    assert values == expected


def vars_of(arch: object) -> dict[str, object]:
    return {name: object.__getattribute__(arch, name) for name in type(arch).__dataclass_fields__}  # type: ignore[attr-defined]


def test_model_type_stands_in_for_a_missing_architecture(tmp_path: Path) -> None:
    config = {k: v for k, v in LLAMA.items() if k != "architectures"}
    assert load(tmp_path, config | {"model_type": "qwen2"}).arch.architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            2048,
        ),
    ],
)
def test_scaling_decides_the_context_length(tmp_path: Path, scaling: dict[str, object], length: int) -> None:
    arch = load(tmp_path, LLAMA | {"rope_scaling": scaling}).arch
    assert arch.max_position_embeddings == length
    assert arch.rope_scaling.factor == scaling["factor"]


def test_end_ids_are_the_tokenizers_own_then_the_generation_configs(tmp_path: Path) -> None:
    checkpoint = load(
        tmp_path,
        LLAMA | {"eos_token_id": 9, "bos_token_id": 1},
        tokenizer_config={"eos_token": {"content": "<end>"}, "added_tokens_decoder": {"5": {"content": "<end>"}}},
        generation_config={"eos_token_id": [7, 5, 8], "temperature": 0.6, "top_k": 20, "do_sample": True},
    )
    assert checkpoint.eos_token_ids == (5, 7, 8)
    assert checkpoint.bos_token_id == 1
    assert checkpoint.generation_defaults == {"temperature": 0.6, "top_k": 20}


def test_end_id_is_found_in_the_tokenizers_vocabulary(tmp_path: Path) -> None:
    files = {"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": {"model": {"vocab": {"a": 0, "</s>": 2}}}}
    assert load(tmp_path, LLAMA | {"eos_token_id": 9}, **files).eos_token_ids == (2, 9)


def test_end_ids_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA | {"eos_token_id": [4, 100]}).eos_token_ids == (4,)


def test_sampling_defaults_take_finite_numbers_only() -> None:
    values = {"temperature": 0.5, "top_p": True, "top_k": "40", "min_p": float("inf"), "num_beams": 4}
    assert sampling_defaults(values) == {"temperature": 0.5}


def test_unsupported_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    message = refusal(write_folder(tmp_path, LLAMA | {"architectures": ["FooForCausalLM"]}))
    assert "architecture 'FooForCausalLM' is not supported; supported: LlamaForCausalLM, MistralForCausalLM" in message


def test_remote_code_of_a_config_is_never_looked_at(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, LLAMA | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    (folder / "evil.py").write_text("raise SystemExit(99)\n")
    assert load_checkpoint(folder).arch.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head size 7"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rope_theta": 0.0}, "rope_theta 0.0 is not above 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor 0.5 is below 1"),
        ({"rope_scaling": [1]}, "rope_scaling is not an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "bits is missing"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is not a list"),
    ],
)
def test_impossible_config_value_is_refused_by_name(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    message = refusal(write_folder(tmp_path, LLAMA | changes))
    assert problem in message
    assert "config.json" in message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 200_000])
def test_config_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_folder(tmp_path, LLAMA)
    (folder / "config.json").write_bytes(content)
    assert "config.json" in refusal(folder)


def test_missing_path_and_wrong_files_say_what_to_give(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "absent")
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "not .gguf" in refusal(tmp_path / "weights.bin")
    assert "no config.json and no .gguf" in refusal(tmp_path)


def test_weights_that_can_carry_code_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, LLAMA)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "can carry code" in refusal(folder)
    assert load_checkpoint(folder, need_weights=False).weight_files == ()


def test_sharded_weights_are_listed_from_the_index(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}}
    folder = write_folder(tmp_path, LLAMA, **{"model.safetensors.index": index})
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (folder / name).write_bytes(b"")
    names = [Path(file).name for file in load_checkpoint(folder).weight_files]
    assert names == ["model-1.safetensors", "model-2.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"a": "gone.safetensors"}, "1 of 1 files are missing: gone.safetensors"),
        ({"a": "../outside.safetensors"}, "not the name of a safetensors file"),
        ({"a": "model.bin"}, "not the name of a safetensors file"),
        ({}, "has no weight_map"),
    ],
)
def test_index_that_leads_nowhere_is_refused(tmp_path: Path, weight_map: dict[str, str], problem: str) -> None:
    folder = write_folder(tmp_path, LLAMA, **{"model.safetensors.index": {"weight_map": weight_map}})
    assert problem in refusal(folder)


def write_gguf(path: Path, architecture: str = "llama", **entries: object) -> Path:
    """Write a header-only llama file; entries are changes below the architecture's prefix, None leaves one out."""
    values: dict[str, object] = {
        "context_length": 1024,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 30000.0,
    } | entries
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        name = f"{architecture}.{key}"
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_bos_token_id(1)
    writer.add_tensor("token_embd.weight", np.zeros((50, 64), np.float32))
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_header_becomes_the_same_kind_of_arch(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf"))
    arch = checkpoint.arch
    assert (checkpoint.format, checkpoint.eos_token_ids, checkpoint.bos_token_id) == ("gguf", (2, 3), 1)
    assert (arch.architecture, arch.vocab_size, arch.num_layers, arch.head_size) == ("LlamaForCausalLM", 50, 2, 16)
    assert (arch.rope_theta, arch.max_position_embeddings) == (30000.0, 1024)
    assert arch.tie_word_embeddings
    assert arch.qkv_bias
    assert arch.checkpoint_dtype == "float32"


def test_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert load_checkpoint(tmp_path).weight_files == (str(tmp_path / "m.gguf"),)
    write_gguf(tmp_path / "n.gguf")
    assert "several .gguf files; name one of them: m.gguf, n.gguf" in refusal(tmp_path)


def test_gguf_yarn_scaling_is_read(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256},
    )
    assert load_checkpoint(path).arch.rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_max_position=256)


def test_gguf_values_given_per_layer_must_be_equal(tmp_path: Path) -> None:
    arch = load_checkpoint(write_gguf(tmp_path / "m.gguf", **{"attention.head_count_kv": [2, 2]})).arch
    assert arch.num_kv_heads == 2
    assert "head_count_kv" in refusal(write_gguf(tmp_path / "n.gguf", **{"attention.head_count_kv": [2, 4]}))


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"embedding_length": None}, "embedding_length is missing"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope.dimension_count": 8}, "part of the head"),
        ({"attention.value_length": 8}, "different sizes"),
        ({"rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"block_count": 1 << 30}, "block_count is 1073741824"),
    ],
)
def test_gguf_that_cannot_be_served_is_refused(tmp_path: Path, entries: dict[str, object], problem: str) -> None:
    assert problem in refusal(write_gguf(tmp_path / "m.gguf", **entries))


def test_gguf_of_another_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    message = refusal(write_gguf(tmp_path / "m.gguf", "mamba"))
    assert "'mamba' is not supported; supported: llama, qwen2, qwen3" in message


def test_damaged_gguf_headers_never_raise_anything_else(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    end = read_gguf_header(tmp_path / "m.gguf").data_offset
    random_ = random.Random(2)
    num_refused = 0
    for _ in range(1000):
        mutant = bytearray(whole)
        mutant[random_.randrange(4, end)] = random_.randrange(256)
        (tmp_path / "x.gguf").write_bytes(mutant)
        try:
            load_checkpoint(tmp_path / "x.gguf")
        except ConfigError:
            num_refused += 1
    assert num_refused > 100
