"""Writes tiny seeded checkpoints of AWQ, GPTQ and compressed-tensors, packed number by number as the formats say.

Each writer gives the transformers model with the very values that a reader must find.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.checkpoints import build_reference, write_tokenizer

# Inputs of 128, 96 and 192: whole groups of 32, and a last group that is not full for 64 and 128.
SIZES: Final[Mapping[str, object]] = {
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
}
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Codes:
    """A matrix in whole numbers: codes [num_out, num_in], scales and zeros [num_out, num_groups], groups [num_in]."""

    codes: np.ndarray
    scales: torch.Tensor
    zeros: np.ndarray
    groups: np.ndarray

    def values(self) -> torch.Tensor:
        """Give the exact values as float32."""
        whole = (self.codes - self.zeros[:, self.groups]).astype(np.float64)
        return (torch.from_numpy(whole) * self.scales.double()[:, self.groups]).float()


@dataclass(frozen=True)
class Settings:
    """How matrices are rounded. group 0: a whole row. mixes_inputs: groups of inputs that are no neighbours."""

    bits: int = 4
    group: int = 32
    symmetric: bool = False
    mixes_inputs: bool = False
    scale_type: torch.dtype = torch.float16


def round_matrix(weight: torch.Tensor, settings: Settings, seed: int) -> Codes:
    """Round a matrix to the nearest codes of each group."""
    num_out, num_in = weight.shape
    size = settings.group or num_in
    groups = np.arange(num_in) // size
    if settings.mixes_inputs:
        groups = np.random.default_rng(seed).permutation(groups)
    largest = (1 << settings.bits) - 1
    num_groups = -(-num_in // size)
    scales = torch.empty(num_out, num_groups, dtype=settings.scale_type)
    zeros = np.empty((num_out, num_groups), dtype=np.int64)
    codes = np.empty((num_out, num_in), dtype=np.int64)
    wide = weight.double().numpy()
    for group in range(num_groups):
        part = wide[:, groups == group]
        low, high = np.minimum(part.min(axis=1), 0.0), np.maximum(part.max(axis=1), 0.0)
        if settings.symmetric:
            high = np.maximum(high, -low)
            low = -high
        scales[:, group] = torch.from_numpy((high - low) / largest)
        scale = scales[:, group].double().numpy()
        # A zero point of at least 1: the first GPTQ format has no place for 0.
        zeros[:, group] = (largest + 1) // 2 if settings.symmetric else np.clip(np.rint(-low / scale), 1, largest)
        codes[:, groups == group] = np.clip(np.rint(part / scale[:, None]) + zeros[:, group, None], 0, largest)
    return Codes(codes, scales, zeros, groups)


def pack_rows(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack rows of whole numbers into 32-bit words; field f of a word holds number order[f] of those it covers."""
    per_word = 32 // bits
    words = np.zeros((values.shape[0], -(-values.shape[1] // per_word)), dtype=np.uint32)
    for column in range(values.shape[1]):
        word, place = divmod(column, per_word)
        field = place if order is None else order.index(place)
        words[:, word] |= values[:, column].astype(np.uint32) << np.uint32(bits * field)
    return torch.from_numpy(words.view(np.int32))


def awq_tensors(matrix: Codes, settings: Settings) -> dict[str, torch.Tensor]:
    """Pack a matrix as AutoAWQ does: inputs in rows, eight outputs in a word."""
    return {
        "qweight": pack_rows(matrix.codes.T, 4, AWQ_ORDER),
        "qzeros": pack_rows(matrix.zeros.T, 4, AWQ_ORDER),
        "scales": matrix.scales.T.contiguous(),
    }


def gptq_tensors(matrix: Codes, settings: Settings, *, zero_shift: int = 1) -> dict[str, torch.Tensor]:
    """Pack a matrix as AutoGPTQ does: outputs in columns, neighbouring inputs in a word."""
    return {
        "qweight": pack_rows(matrix.codes, settings.bits).T.contiguous(),
        "qzeros": pack_rows(matrix.zeros.T - zero_shift, settings.bits),
        "scales": matrix.scales.T.contiguous(),
        "g_idx": torch.from_numpy(matrix.groups.astype(np.int32)),
    }


def gptq_v2_tensors(matrix: Codes, settings: Settings) -> dict[str, torch.Tensor]:
    """The same with zero points as they are."""
    return gptq_tensors(matrix, settings, zero_shift=0)


def packed_tensors(matrix: Codes, settings: Settings) -> dict[str, torch.Tensor]:
    """Pack a matrix as compressed-tensors does in its format pack-quantized."""
    tensors = {
        "weight_packed": pack_rows(matrix.codes, settings.bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if not settings.symmetric:
        # Neighbours of a column in a word.
        tensors["weight_zero_point"] = pack_rows(matrix.zeros.T, settings.bits).T.contiguous()
    if settings.mixes_inputs:
        tensors["weight_g_idx"] = torch.from_numpy(matrix.groups.astype(np.int32))
    return tensors


def byte_tensors(matrix: Codes, settings: Settings) -> dict[str, torch.Tensor]:
    """Store a matrix as compressed-tensors does in its format int-quantized."""
    middle = 1 << (settings.bits - 1)
    tensors = {
        "weight": torch.from_numpy((matrix.codes - middle).astype(np.int8)),
        "weight_scale": matrix.scales,
    }
    if not settings.symmetric:
        tensors["weight_zero_point"] = torch.from_numpy((matrix.zeros - middle).astype(np.int8))
    return tensors


Packer = Callable[[Codes, Settings], dict[str, torch.Tensor]]
PACKERS: Final[Mapping[str, Packer]] = {
    "awq": awq_tensors,
    "gptq": gptq_tensors,
    "gptq_v2": gptq_v2_tensors,
    "pack-quantized": packed_tensors,
    "int-quantized": byte_tensors,
}


def quantization_config(kind: str, settings: Settings) -> dict[str, object]:
    """Give the entry of config.json that goes with a kind of PACKERS."""
    if kind == "awq":
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": settings.bits,
            "group_size": settings.group or -1,
            "zero_point": not settings.symmetric,
            "modules_to_not_convert": None,
        }
    if kind in ("gptq", "gptq_v2"):
        return {
            "quant_method": "gptq",
            "checkpoint_format": kind,
            "bits": settings.bits,
            "group_size": settings.group or -1,
            "sym": settings.symmetric,
            "desc_act": settings.mixes_inputs,
        }
    weights = {
        "num_bits": settings.bits,
        "type": "int",
        "symmetric": settings.symmetric,
        "strategy": "group" if settings.group else "channel",
        "group_size": settings.group or None,
        "actorder": "group" if settings.mixes_inputs else None,
        "dynamic": False,
    }
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group | ({"input_activations": activations} if kind == "int-quantized" else {})},
    }


def write_quantized(
    folder: Path,
    kind: str,
    settings: Settings | None = None,
    *,
    family: str = "llama",
    config: Mapping[str, object] | None = None,
    keeps: Callable[[str], bool] = lambda name: False,
    **changes: object,
) -> PreTrainedModel:
    """Write a seeded model with the matrices of its layers packed; gives it with the values that they stand for.

    config replaces entries of the quantisation's description; matrices that keeps names stay float16, as do all others.
    """
    settings = settings or Settings()
    model = build_reference(family, **(dict(SIZES) | changes)).half().float()
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(sorted(model.named_parameters())):
            stem = name.removesuffix(".weight")
            if not stem.endswith("_proj") or keeps(name):
                tensors[name] = parameter.half()
                continue
            # Queries, keys and values, gates and ups see the same inputs, each with groups of its own.
            matrix = round_matrix(parameter, settings, seed)
            parameter.copy_(matrix.values())
            tensors |= {f"{stem}.{part}": tensor for part, tensor in PACKERS[kind](matrix, settings).items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    content = json.loads(model.config.to_json_string())
    content |= {"architectures": [type(model).__name__], "torch_dtype": "float16"}
    content["quantization_config"] = quantization_config(kind, settings) | dict(config or {})
    (folder / "config.json").write_text(json.dumps(content))
    write_tokenizer(folder)
    return model
