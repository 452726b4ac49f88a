"""Reads how the weights of a folder are stored as integers: quantization_config, or the older files beside it.

Source: the formats of AutoAWQ, AutoGPTQ, GPTQModel and compressed-tensors, as their packages write them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from serve.checkpoint.arch import Quantization, WeightScheme
from serve.checkpoint.fields import Fields, fail, read_json

_SUPPORTED: Final = (
    "supported: awq (version gemm, 4 bits), gptq (4 and 8 bits), compressed-tensors (pack-quantized and int-quantized, "
    "4 and 8 bits), GGUF"
)
_WAY_OUT: Final = "take a checkpoint of a supported kind, or the unquantised model"
# Files of folders whose config.json says nothing, and the method that they stand for.
_OLDER_FILES: Final = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_CONFIG_KEYS: Final = ("quantization_config", "compression_config")
_COMPRESSED_FORMATS: Final = ("pack-quantized", "int-quantized", "naive-quantized")
_MAX_GROUP: Final = 1 << 20


def read_quantization(folder: Path, config: Fields) -> Quantization | None:
    """Describe the quantised weights of a folder, None for plain ones. Raises ConfigError for what is not supported."""
    for key in _CONFIG_KEYS:
        fields = config.child(key)
        if fields is not None:
            return _describe(fields, fields.text("quant_method") or "")
    for file, method in _OLDER_FILES.items():
        path = folder / file
        if path.is_file():
            fields = Fields(path, read_json(path, required=True))
            return _describe(fields, fields.text("quant_method") or method)
    return None


def _describe(fields: Fields, method: str) -> Quantization:
    reader = _READERS.get(method)
    if reader is None:
        named = f"quantisation method {method!r}" if method else "a quantisation without quant_method"
        _refuse(fields, f"{named} is not supported")
    return reader(fields)


def _refuse(fields: Fields, problem: str) -> NoReturn:
    fail(fields.path, f"{problem}; {_SUPPORTED}; {_WAY_OUT}")


def _bits(fields: Fields, key: str, allowed: tuple[int, ...], method: str) -> int:
    bits = fields.integer(key, minimum=1, maximum=64)
    if bits not in allowed:
        _refuse(fields, f"{method} weights of {bits} bits are not supported")
    return bits


def _group_size(fields: Fields, key: str) -> int:
    """Give the inputs that share a scale, 0 for all of an output."""
    size = fields.integer(key, -1, minimum=-1, maximum=_MAX_GROUP)
    return max(size, 0)


def _awq(fields: Fields) -> Quantization:
    version = (fields.text("version") or "gemm").lower()
    if version != "gemm":
        _refuse(fields, f"awq version {version!r} is not supported")
    backend = fields.text("backend")
    if backend not in (None, "autoawq"):
        _refuse(fields, f"awq backend {backend!r} is not supported")
    # AutoAWQ's own file has other names than transformers'.
    bits = _bits(fields, "bits" if fields.has("bits") else "w_bit", (4,), "awq")
    group_size = _group_size(fields, "group_size" if fields.has("group_size") else "q_group_size")
    return Quantization("awq", (WeightScheme(bits, group_size),))


def _gptq(fields: Fields) -> Quantization:
    version = fields.text("checkpoint_format") or "gptq"
    if fields.boolean("is_marlin_format", False):
        version = "marlin"
    if version not in ("gptq", "gptq_v2"):
        _refuse(fields, f"gptq checkpoint_format {version!r} is not supported")
    overrides = fields.child("dynamic")
    changed = [] if overrides is None else [key for key in overrides.names() if not key.startswith("-:")]
    if changed:
        _refuse(fields, f"gptq settings for single modules (dynamic: {changed[0]!r}) are not supported")
    bits = _bits(fields, "bits", (4, 8), "gptq")
    # The first version of the format stores zero points less one.
    scheme = WeightScheme(bits, _group_size(fields, "group_size"))
    return Quantization("gptq", (scheme,), zero_shift=1 if version == "gptq" else 0)


def _compressed_tensors(fields: Fields) -> Quantization:
    default = fields.text("format")
    _refuse_transforms(fields)
    groups = fields.child("config_groups")
    if groups is None or not groups.size:
        _refuse(fields, "compressed-tensors without config_groups says nothing about its weights")
    schemes: list[WeightScheme] = []
    activations: str | None = None
    for key in groups.names():
        group = groups.child(key) or Fields(fields.path, {})
        kind = group.text("format") or default
        if kind not in _COMPRESSED_FORMATS:
            _refuse(fields, f"compressed-tensors format {kind!r} is not supported")
        weights = group.child("weights")
        if weights is None:
            _refuse(fields, f"compressed-tensors group {key!r} without weights is not supported")
        schemes.append(_weight_scheme(weights))
        inputs = group.child("input_activations")
        if inputs is not None:
            activations = f"{inputs.text('type', 'int')}{inputs.integer('num_bits', 8)}"
    return Quantization("compressed-tensors", tuple(dict.fromkeys(schemes)), activations=activations)


def _refuse_transforms(fields: Fields) -> None:
    """Refuse what changes the weights' meaning beyond codes, scales and zero points."""
    sparsity = fields.child("sparsity_config")
    if sparsity is not None and (sparsity.text("format") or "dense") != "dense":
        _refuse(fields, f"compressed-tensors sparsity format {sparsity.text('format')!r} is not supported")
    transforms = fields.child("transform_config")
    if transforms is not None and transforms.size:
        _refuse(fields, "compressed-tensors with a transform_config is not supported")


def _weight_scheme(weights: Fields) -> WeightScheme:
    kind = weights.text("type") or "int"
    bits = weights.integer("num_bits", 8, maximum=64)
    if kind != "int" or bits not in (4, 8):
        _refuse(weights, f"compressed-tensors weights of type {kind}{bits} are not supported")
    has_group = weights.has("group_size") and weights.integer("group_size", minimum=-1) > 0
    strategy = weights.text("strategy") or ("group" if has_group else "tensor")
    if strategy not in ("tensor", "channel", "group"):
        _refuse(weights, f"compressed-tensors weights with strategy {strategy!r} are not supported")
    if strategy != "group":
        return WeightScheme(bits, 0)
    return WeightScheme(bits, weights.integer("group_size", maximum=_MAX_GROUP))


_READERS: Final[dict[str, Callable[[Fields], Quantization]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
}
