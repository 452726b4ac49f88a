"""Finds a checkpoint's files and reads its description: config.json or GGUF header to ModelArch; no tensors.

Model files are data: everything read here is JSON or a GGUF header, type-checked field by field, and names of files
found inside them may not leave the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from serve.errors import ConfigError, ExitCode
from serve.gguf import GGUFHeader, read_gguf_header
from serve.sampling_params import DEFAULT_SAMPLING_KEYS

_MAX_JSON_BYTES: Final = 256 << 20
# Beyond this a file is damaged, and listing the parameters of so many layers would only cost memory.
_MAX_LAYERS: Final = 4096


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling. kind: none, linear, dynamic, llama3, yarn or table; other fields as in the checkpoint's config.

    table means that the file itself holds a divisor for each frequency (GGUF tensor rope_freqs.weight).
    """

    kind: str = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelArch:
    """A decoder's shape, the same whatever file it came from. Lengths in elements, positions in tokens.

    max_position_embeddings is the longest context the model can serve, rotary scaling included.
    sliding_window applies to the layers listed in sliding_layers (all layers when the tuple is empty and
    sliding_window is set). checkpoint_dtype is float32, bfloat16, float16, or quantized for GGUF blocks.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    checkpoint_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. format is "safetensors" or "gguf"; root is the folder, weight_files absolute paths.

    eos_token_ids: primary first, then secondary ones. generation_defaults: the DEFAULT_SAMPLING_KEYS that the
    model's generation_config.json sets.
    """

    name: str
    root: str
    format: str
    weight_files: tuple[str, ...]
    arch: ModelArch
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture name implies beyond its config.json.

    The booleans are biases and norms that the layers have whatever the config says; the *_default fields are what
    an absent config entry means.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    window_needs_switch: bool = False
    head_dim_default: int | None = None
    max_position_default: int = 2048


FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(max_position_default=131072),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window_needs_switch=True, max_position_default=32768),
    "Qwen3ForCausalLM": Family(
        qk_norm=True,
        reads_attention_bias=True,
        window_needs_switch=True,
        head_dim_default=128,
        max_position_default=32768,
    ),
}
# model_type of config.json, for folders whose config names no architecture.
_MODEL_TYPES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_GGUF_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES: Final = ("float32", "bfloat16", "float16")


def load_checkpoint(path: str | Path, *, name: str | None = None, need_weights: bool = True) -> Checkpoint:
    """Describe the model in a folder (safetensors, or a single .gguf) or in a .gguf file.

    name is what people called it (default: the path). need_weights=False accepts a folder without weight files, for
    dummy weights. Raises ConfigError (exit code MODEL) that names the file and what is wrong with it.
    """
    path = Path(path)
    name = name if name is not None else str(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            _fail(path, "is a file but not .gguf; give a .gguf file or a folder with config.json and safetensors")
        return _from_gguf(path, name)
    if not path.is_dir():
        _fail(path, "does not exist")
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _from_gguf(ggufs[0], name)
        if ggufs:
            names = ", ".join(p.name for p in ggufs)
            _fail(path, f"holds several .gguf files; name one of them: {names}")
        _fail(path, "has no config.json and no .gguf file; it is not a model folder")
    return _from_folder(path, name, need_weights)


def read_generation_config(folder: str | Path, *, required: bool = False) -> dict[str, object]:
    """Read generation_config.json of a folder; an absent file gives an empty object, or ConfigError when required."""
    return _read_json(Path(folder) / "generation_config.json", required=required)


def sampling_defaults(generation_config: Mapping[str, object]) -> dict[str, float]:
    """Pick the sampling values that a generation config sets; values that are not finite numbers are left out."""
    defaults: dict[str, float] = {}
    for key in DEFAULT_SAMPLING_KEYS:
        value = generation_config.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf"):
            defaults[key] = value
    return defaults


def _fail(path: Path, problem: str) -> NoReturn:
    raise ConfigError(f"{path}: {problem}", ExitCode.MODEL)


def _unsupported(path: Path, architecture: str) -> NoReturn:
    _fail(path, f"architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}")


def _read_json(path: Path, *, required: bool) -> dict[str, object]:
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            _fail(path, f"has {size} bytes; at most {_MAX_JSON_BYTES} are read")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        if required:
            _fail(path, "does not exist")
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", ExitCode.MODEL) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}", ExitCode.MODEL) from error
    if not isinstance(content, dict):
        _fail(path, "does not hold a JSON object")
    return content


class _Fields:
    """Typed access to a JSON object; a wrong type is a ConfigError that names file and key. null counts as absent."""

    def __init__(self, path: Path, content: Mapping[str, object]) -> None:
        self.path = path
        self._content = content

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = 1 << 31) -> int:
        value = self._content.get(key)
        value = default if value is None else value
        if value is None:
            _fail(self.path, f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            _fail(self.path, f"{key} is {value!r}, not an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional_number(key)
        if value is not None:
            return value
        if default is None:
            _fail(self.path, f"{key} is missing")
        return default

    def optional_number(self, key: str) -> float | None:
        value = self._content.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
            _fail(self.path, f"{key} is {value!r}, not a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._content.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            _fail(self.path, f"{key} is {value!r}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self._content.get(key)
        value = default if value is None else value
        if value is not None and not isinstance(value, str):
            _fail(self.path, f"{key} is {value!r}, not a string")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple; empty when absent."""
        value = self._content.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                _fail(self.path, f"{key} is {value!r}, not a token id or a list of token ids")
        return tuple(items)

    def texts(self, key: str) -> list[str] | None:
        value = self._content.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            _fail(self.path, f"{key} is not a list of strings")
        return value

    def child(self, key: str) -> _Fields | None:
        value = self._content.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            _fail(self.path, f"{key} is not an object")
        return _Fields(self.path, value)

    def has(self, key: str) -> bool:
        return self._content.get(key) is not None


def _from_folder(folder: Path, name: str, need_weights: bool) -> Checkpoint:
    config = _Fields(folder / "config.json", _read_json(folder / "config.json", required=True))
    arch = _arch_from_config(config)
    generation = read_generation_config(folder)
    eos = _eos_ids(folder, config, _Fields(folder / "generation_config.json", generation))
    return Checkpoint(
        name=name,
        root=str(folder.resolve()),
        format="safetensors",
        weight_files=_weight_files(folder) if need_weights else (),
        arch=arch,
        eos_token_ids=_producible(eos, arch),
        bos_token_id=next(iter(config.ids("bos_token_id")), None),
        generation_defaults=sampling_defaults(generation),
    )


def _arch_from_config(config: _Fields) -> ModelArch:
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    if config.has("quantization_config"):
        _fail(config.path, "the weights are quantised (quantization_config); only plain safetensors and GGUF are read")
    num_layers = config.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        _fail(config.path, f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    hidden_size = config.integer("hidden_size")
    head_size = config.integer("head_dim", family.head_dim_default or max(hidden_size // num_heads, 1))
    if head_size % 2 or head_size < 4:
        _fail(config.path, f"head size {head_size} is not an even number of at least 4, as rotary embeddings need")
    rope_theta, scaling, context = _rope_from_config(
        config, config.integer("max_position_embeddings", family.max_position_default)
    )
    window, sliding_layers = _sliding_window(config, family, num_layers)
    attention_bias = family.reads_attention_bias and config.boolean("attention_bias", False)
    dtype = config.text("dtype") or config.text("torch_dtype") or "float32"
    return ModelArch(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=context,
        rope_theta=rope_theta,
        rope_scaling=scaling,
        hidden_act=_activation(config),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and config.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_layers=sliding_layers,
        checkpoint_dtype=dtype if dtype in _DTYPES else "float32",
    )


def _architecture(config: _Fields) -> str:
    names = config.texts("architectures") or []
    model_type = config.text("model_type") or ""
    architecture = names[0] if names else _MODEL_TYPES.get(model_type, model_type)
    if not architecture:
        _fail(config.path, "names no architecture (architectures, model_type)")
    if architecture not in FAMILIES:
        _unsupported(config.path, architecture)
    return architecture


def _activation(config: _Fields) -> str:
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        _fail(config.path, f"hidden_act {activation!r} is not supported; supported: silu")
    return "silu"


def _sliding_window(config: _Fields, family: Family, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Find the window and the layers that use it (empty = all of them)."""
    if not config.has("sliding_window"):
        return None, ()
    if not family.window_needs_switch:
        # Llama configs may carry the key without meaning it; Mistral's is for all layers.
        is_mistral = family is FAMILIES["MistralForCausalLM"]
        return (config.integer("sliding_window"), ()) if is_mistral else (None, ())
    if not config.boolean("use_sliding_window", False):
        return None, ()
    kinds = config.texts("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        layers = tuple(range(min(first, num_layers), num_layers))
    else:
        layers = tuple(i for i, kind in enumerate(kinds[:num_layers]) if kind == "sliding_attention")
    if not layers:
        return None, ()
    return config.integer("sliding_window"), () if len(layers) == num_layers else layers


def _rope_from_config(config: _Fields, max_positions: int) -> tuple[float, RopeScaling, int]:
    """Read base, scaling and the context length that scaling makes possible.

    Older files have rope_theta and rope_scaling at the top, newer ones both in rope_parameters.
    """
    params = config.child("rope_parameters") or config.child("rope_scaling") or _Fields(config.path, {})
    theta = params.number("rope_theta", config.number("rope_theta", 10000.0))
    _check_rope(config.path, theta, RopeScaling())
    if params.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        _fail(config.path, "partial_rotary_factor other than 1 is not supported")
    kind = params.text("rope_type") or params.text("type") or "default"
    if kind == "default":
        return theta, RopeScaling(), max_positions
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        _fail(config.path, f"rope type {kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn")
    original = params.integer(
        "original_max_position_embeddings", config.integer("original_max_position_embeddings", max_positions)
    )
    if kind == "dynamic":
        original = max_positions
    scaling = RopeScaling(
        kind=kind,
        factor=params.number("factor", max_positions / original if kind == "yarn" else None),
        original_max_position=original,
        low_freq_factor=params.number("low_freq_factor", 1.0),
        high_freq_factor=params.number("high_freq_factor", 4.0),
        attention_factor=params.optional_number("attention_factor"),
        beta_fast=params.number("beta_fast", 32.0),
        beta_slow=params.number("beta_slow", 1.0),
        mscale=params.number("mscale", 0.0),
        mscale_all_dim=params.number("mscale_all_dim", 0.0),
        truncate=params.boolean("truncate", True),
    )
    _check_rope(config.path, theta, scaling)
    if kind == "llama3":
        return theta, scaling, max_positions
    base_length = original if kind == "yarn" else max_positions
    return theta, scaling, max(max_positions, int(base_length * scaling.factor))


def _check_rope(path: Path, theta: float, scaling: RopeScaling) -> None:
    """Refuse values that have no frequencies: the formulas divide by them or take their logarithm."""
    if theta <= 1.0:
        _fail(path, f"rope_theta {theta} is not above 1")
    if scaling.factor < 1.0:
        _fail(path, f"rope scaling factor {scaling.factor} is below 1")
    if scaling.high_freq_factor <= scaling.low_freq_factor or scaling.low_freq_factor <= 0:
        _fail(path, "rope scaling needs 0 < low_freq_factor < high_freq_factor")
    if scaling.beta_fast <= 0 or scaling.beta_slow <= 0:
        _fail(path, "rope scaling needs beta_fast and beta_slow above 0")


def _weight_files(folder: Path) -> tuple[str, ...]:
    """Find the safetensors files of a folder, from the index when there is one."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = _read_json(index_path, required=True).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            _fail(index_path, "has no weight_map")
        names = sorted({str(value) for value in weight_map.values()})
        # A name is a file beside the index, never a path.
        bad = [name for name in names if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", name)]
        if bad:
            _fail(index_path, f"names {bad[0]!r}, which is not the name of a safetensors file")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            _fail(index_path, f"{len(missing)} of {len(names)} files are missing: {', '.join(missing[:4])}")
        return tuple(str((folder / name).resolve()) for name in names)
    single = folder / "model.safetensors"
    # consolidated.safetensors repeats the same weights under other names.
    others = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    files = [single] if single.is_file() else others
    if not files:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
            _fail(folder, "has only .bin or .pth weights, which can carry code; convert them to safetensors")
        _fail(folder, "has no .safetensors files")
    return tuple(str(p.resolve()) for p in files)


def _producible(token_ids: Iterable[int], arch: ModelArch) -> tuple[int, ...]:
    """Keep each id once, without those beyond the vocabulary: no step can produce them."""
    return tuple(dict.fromkeys(i for i in token_ids if 0 <= i < arch.vocab_size))


def _eos_ids(folder: Path, config: _Fields, generation: _Fields) -> tuple[int, ...]:
    """Collect the ids that end a text: the tokenizer's own first, then those of the two config files."""
    primary = _tokenizer_eos_id(folder)
    listed = generation.ids("eos_token_id") or config.ids("eos_token_id")
    return listed if primary is None else (primary, *listed)


def _tokenizer_eos_id(folder: Path) -> int | None:
    path = folder / "tokenizer_config.json"
    content = _read_json(path, required=False)
    token = content.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    added = content.get("added_tokens_decoder")
    if isinstance(added, dict):
        for key, entry in added.items():
            if isinstance(entry, dict) and entry.get("content") == token and key.isdecimal():
                return int(key)
    return _id_in_tokenizer_json(folder / "tokenizer.json", token)


def _id_in_tokenizer_json(path: Path, token: str) -> int | None:
    content = _read_json(path, required=False)
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == token and isinstance(entry.get("id"), int):
            return int(entry["id"])
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found = vocab.get(token) if isinstance(vocab, dict) else None
    return found if isinstance(found, int) else None


def _from_gguf(path: Path, name: str) -> Checkpoint:
    header = read_gguf_header(path)
    arch = _arch_from_gguf(path, header)
    eos = [header.get_int(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return Checkpoint(
        name=name,
        root=str(path.resolve().parent),
        format="gguf",
        weight_files=(str(path.resolve()),),
        arch=arch,
        eos_token_ids=_producible([i for i in eos if i is not None], arch),
        bos_token_id=header.get_int("tokenizer.ggml.bos_token_id"),
    )


def _arch_from_gguf(path: Path, header: GGUFHeader) -> ModelArch:
    prefix = header.get_str("general.architecture")
    if prefix not in _GGUF_ARCHITECTURES:
        supported = ", ".join(_GGUF_ARCHITECTURES)
        _fail(path, f"GGUF architecture {prefix!r} is not supported; supported: {supported}")
    if (header.get_int("split.count") or 1) > 1:
        _fail(path, "is one part of a split file; merge the parts with llama-gguf-split --merge")
    if (header.get_int(f"{prefix}.expert_count") or 0) > 0:
        _fail(path, "is a mixture of experts, which is not supported")
    fields = _Fields(path, _own_metadata(header, prefix))
    num_heads = fields.integer("attention.head_count")
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    hidden_size = fields.integer("embedding_length")
    head_size = fields.integer("attention.key_length", max(hidden_size // num_heads, 1))
    if num_heads % num_kv_heads or head_size % 2 or head_size < 4:
        _fail(path, f"{num_heads} heads, {num_kv_heads} kv heads and head size {head_size} do not go together")
    if fields.integer("attention.value_length", head_size) != head_size:
        _fail(path, "keys and values of different sizes are not supported")
    if fields.integer("rope.dimension_count", head_size) != head_size:
        _fail(path, "rotary embeddings on a part of the head are not supported")
    scaling, context = _rope_from_gguf(fields, header)
    architecture = _GGUF_ARCHITECTURES[prefix]
    embedding = header.tensors.get("token_embd.weight")
    return ModelArch(
        architecture=architecture,
        vocab_size=embedding.shape[0] if embedding is not None else fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count", maximum=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context,
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        qk_norm=FAMILIES[architecture].qk_norm,
        sliding_window=fields.integer("attention.sliding_window", 0, minimum=0) or None,
        checkpoint_dtype=_gguf_dtype(header),
    )


def _own_metadata(header: GGUFHeader, prefix: str) -> dict[str, object]:
    """Pick the entries under the architecture's name; lists of one value per layer that are all equal become it."""
    own: dict[str, object] = {}
    for key, value in header.metadata.items():
        if key.startswith(prefix + "."):
            is_uniform = isinstance(value, list) and value and all(item == value[0] for item in value)
            own[key.removeprefix(prefix + ".")] = value[0] if is_uniform and isinstance(value, list) else value
    return own


def _rope_from_gguf(fields: _Fields, header: GGUFHeader) -> tuple[RopeScaling, int]:
    """Read the scaling; context_length already includes it in this format."""
    context = fields.integer("context_length")
    kind = fields.text("rope.scaling.type") or "none"
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "none" and fields.has("rope.scale_linear"):
        kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        _fail(fields.path, f"rope scaling {kind!r} is not supported; supported: none, linear, yarn")
    original = fields.integer("rope.scaling.original_context_length", context)
    scaling = RopeScaling(kind=kind, factor=factor, original_max_position=original)
    _check_rope(fields.path, fields.number("rope.freq_base", 10000.0), scaling)
    if "rope_freqs.weight" in header.tensors:
        return RopeScaling(kind="table"), context
    if kind == "none" or factor == 1.0:
        return RopeScaling(), context
    return scaling, context


def _gguf_dtype(header: GGUFHeader) -> str:
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    matrices = {info.type.name for info in header.tensors.values() if len(info.shape) > 1}
    if len(matrices) == 1:
        return plain.get(matrices.pop(), "quantized")
    return "quantized"
