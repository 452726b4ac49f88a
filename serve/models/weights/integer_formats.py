"""Unpacks the matrices of AWQ, GPTQ and compressed-tensors files: 32-bit words to codes, scales and zero points.

Source: what AutoAWQ (gemm), AutoGPTQ and GPTQModel (gptq, gptq_v2) and compressed-tensors (pack-quantized,
int-quantized) write. Words hold their first number in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from serve.checkpoint import Quantization, WeightScheme
from serve.errors import ConfigError, ExitCode
from serve.models.weights.integer_matrix import IntegerMatrix

_WORD_BITS: Final = 32
# Output of eight neighbours that each four bits of an AWQ word belong to.
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The tensors of one matrix by the last part of their names, and how the checkpoint says they are stored."""

    name: str
    tensors: Mapping[str, Tensor]
    quantization: Quantization

    @property
    def scheme(self) -> WeightScheme:
        """The one scheme of a method that has one for all matrices."""
        return self.quantization.schemes[0]

    def error(self, problem: str) -> ConfigError:
        """Give the error (exit code MODEL) about this matrix."""
        kind = self.quantization.description
        return ConfigError(
            f"{self.name}: {problem}; the checkpoint says its weights are {kind}, fetch it again or correct its config",
            ExitCode.MODEL,
        )

    def take(self, part: str, dtypes: Sequence[torch.dtype], shape: tuple[int, ...]) -> Tensor:
        """Give a tensor that must be there with a type and a shape."""
        tensor = self.tensors.get(part)
        if tensor is None:
            raise self.error(f"tensor {part} is missing")
        if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            found = str(tensor.dtype).removeprefix("torch.")
            raise self.error(f"tensor {part} is {found} {list(tensor.shape)}, expected {wanted} {list(shape)}")
        return tensor

    def groups(self, part: str, num_in: int, group_size: int) -> Tensor:
        """Give the group of each input: as a tensor of the file says, else neighbours of group_size."""
        plain = torch.arange(num_in) // (group_size or num_in)
        if part not in self.tensors:
            return plain
        groups = self.take(part, (torch.int32, torch.int64), (num_in,)).long()
        num_groups = int(plain[-1]) + 1
        low, high = int(groups.min()), int(groups.max())
        if low < 0 or high >= num_groups:
            raise self.error(f"tensor {part} has groups from {low} to {high} where there are {num_groups}")
        return groups


def matrix_shape(layer: PackedLayer) -> tuple[int, int]:
    """Give outputs and inputs of a matrix."""
    return _SHAPES[layer.quantization.method](layer)


def unpack_matrix(layer: PackedLayer) -> IntegerMatrix:
    """Unpack a matrix. Raises ConfigError that names the tensor which lacks or does not fit."""
    return _UNPACK[layer.quantization.method](layer)


def primary_tensor(method: str) -> str:
    """Give the last part of the name of the tensor that every packed matrix of a method has."""
    return "weight_packed" if method == "compressed-tensors" else "qweight"


def companion_tensors(method: str) -> tuple[str, ...]:
    """Give the last parts of the names of all tensors that may belong to a packed matrix of a method."""
    return _COMPANIONS[method]


def _words(layer: PackedLayer, part: str) -> Tensor:
    tensor = layer.tensors[part]
    if tensor.dtype != torch.int32 or tensor.dim() != 2:
        found = str(tensor.dtype).removeprefix("torch.")
        raise layer.error(f"tensor {part} is {found} {list(tensor.shape)}, expected int32 with two dimensions")
    return tensor


def _fields(words: Tensor, bits: int) -> Tensor:
    """Unpack words [n, m] int32 along their rows as uint8 [n, m * 32 / bits], the lowest bits first."""
    low_bytes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return low_bytes
    return torch.stack((low_bytes & 15, low_bytes >> 4), dim=-1).view(words.shape[0], -1)


def _num_groups(num_in: int, group_size: int) -> int:
    return -(-num_in // (group_size or num_in))


def _awq_shape(layer: PackedLayer) -> tuple[int, int]:
    num_in, num_words = _words(layer, "qweight").shape
    return num_words * (_WORD_BITS // layer.scheme.bits), num_in


def _unpack_awq(layer: PackedLayer) -> IntegerMatrix:
    num_out, num_in = _awq_shape(layer)
    num_groups = _num_groups(num_in, layer.scheme.group_size)
    qzeros = layer.take("qzeros", (torch.int32,), (num_groups, num_out // 8))
    scales = layer.take("scales", _FLOATS, (num_groups, num_out))
    return IntegerMatrix(
        codes=_awq_outputs(layer.tensors["qweight"]),
        scales=scales.T,
        zeros=_awq_outputs(qzeros).short(),
        groups=layer.groups("", num_in, layer.scheme.group_size),
        bits=layer.scheme.bits,
    )


def _awq_outputs(words: Tensor) -> Tensor:
    """Unpack words [n, num_out / 8] as uint8 [num_out, n]."""
    columns = words.T.contiguous()
    outputs = torch.empty(columns.shape[0], len(_AWQ_ORDER), columns.shape[1], dtype=torch.uint8)
    for field, output in enumerate(_AWQ_ORDER):
        outputs[:, output] = (columns >> (4 * field)) & 15
    return outputs.flatten(0, 1)


def _gptq_shape(layer: PackedLayer) -> tuple[int, int]:
    num_words, num_out = _words(layer, "qweight").shape
    return num_out, num_words * (_WORD_BITS // layer.scheme.bits)


def _unpack_gptq(layer: PackedLayer) -> IntegerMatrix:
    num_out, num_in = _gptq_shape(layer)
    bits = layer.scheme.bits
    num_groups = _num_groups(num_in, layer.scheme.group_size)
    qzeros = layer.take("qzeros", (torch.int32,), (num_groups, -(-num_out * bits // _WORD_BITS)))
    scales = layer.take("scales", _FLOATS, (num_groups, num_out))
    zeros = _fields(qzeros, bits)[:, :num_out]
    return IntegerMatrix(
        codes=_fields(layer.tensors["qweight"].T, bits),
        scales=scales.T,
        zeros=zeros.T.short() + layer.quantization.zero_shift,
        groups=layer.groups("g_idx", num_in, layer.scheme.group_size),
        bits=bits,
    )


def _compressed_shape(layer: PackedLayer) -> tuple[int, int]:
    if "weight_packed" not in layer.tensors:
        weight = layer.tensors["weight"]
        if weight.dim() != 2:
            raise layer.error(f"tensor weight is int8 {list(weight.shape)}, expected two dimensions")
        return weight.shape[0], weight.shape[1]
    sizes: list[int] = layer.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
    packed = _words(layer, "weight_packed")
    num_out, num_in = sizes
    if num_in < 1 or num_out != packed.shape[0] or not _word_bits(layer, num_in, packed.shape[1]):
        raise layer.error(f"tensor weight_packed {list(packed.shape)} does not fit weight_shape {sizes}")
    return num_out, num_in


def _word_bits(layer: PackedLayer, num_in: int, num_words: int) -> list[int]:
    """Give the widths of codes, among those that the checkpoint uses, with which a row fills its words."""
    used = {scheme.bits for scheme in layer.quantization.schemes}
    return [bits for bits in sorted(used) if -(-num_in * bits // _WORD_BITS) == num_words]


def _unpack_compressed(layer: PackedLayer) -> IntegerMatrix:
    num_out, num_in = _compressed_shape(layer)
    if "weight_packed" in layer.tensors:
        words = layer.tensors["weight_packed"]
        # A short row may fill as many words with either width: its scales tell.
        widths = _word_bits(layer, num_in, words.shape[1])
    else:
        widths = sorted({scheme.bits for scheme in layer.quantization.schemes})
    scheme, scales = _matching_scheme(layer, num_out, num_in, widths)
    if "weight_packed" in layer.tensors:
        bits = scheme.bits
        codes = _fields(words, bits)[:, :num_in]
    else:
        bits = 8
        codes = _unsigned(layer.take("weight", (torch.int8,), (num_out, num_in)), bits)
    return IntegerMatrix(
        codes=codes,
        scales=scales,
        zeros=_compressed_zeros(layer, scales, bits),
        groups=layer.groups("weight_g_idx", num_in, scheme.group_size),
        bits=bits,
    )


def _matching_scheme(
    layer: PackedLayer, num_out: int, num_in: int, widths: Sequence[int]
) -> tuple[WeightScheme, Tensor]:
    """Find the scheme of the config that a matrix follows by the shape of its scales [num_out, num_groups]."""
    scales = layer.tensors.get("weight_scale")
    if scales is None:
        raise layer.error("tensor weight_scale is missing")
    if scales.dtype not in _FLOATS:
        raise layer.error(
            f"tensor weight_scale is {str(scales.dtype).removeprefix('torch.')}, expected a floating type"
        )
    shape = tuple(scales.shape)
    for scheme in layer.quantization.schemes:
        allowed: list[tuple[int, ...]] = [(num_out, _num_groups(num_in, scheme.group_size))]
        if not scheme.group_size:
            allowed += [(num_out,), (1,), (1, 1), ()]
        if scheme.bits in widths and shape in allowed:
            return scheme, scales.reshape(scales.shape[0] if scales.dim() else 1, -1).expand(num_out, -1)
    raise layer.error(f"tensor weight_scale {list(shape)} fits no group size for a weight [{num_out}, {num_in}]")


def _compressed_zeros(layer: PackedLayer, scales: Tensor, bits: int) -> Tensor:
    """Give the zero points of unsigned codes int16 [num_out, num_groups]; the file has them signed, packed or not."""
    num_out, num_groups = scales.shape
    zeros = layer.tensors.get("weight_zero_point")
    if zeros is None:
        return torch.full((num_out, num_groups), 1 << (bits - 1), dtype=torch.int16)
    if zeros.dtype == torch.int32:
        words = layer.take("weight_zero_point", (torch.int32,), (-(-num_out * bits // _WORD_BITS), num_groups))
        return _fields(words.T, bits)[:, :num_out].T.short()
    if zeros.numel() == 1:
        zeros = zeros.reshape(1, 1).expand(num_out, num_groups)
    elif zeros.dim() == 1:
        zeros = zeros.unsqueeze(1)
    if zeros.dtype != torch.int8 or zeros.shape != (num_out, num_groups):
        found = f"{str(zeros.dtype).removeprefix('torch.')} {list(zeros.shape)}"
        raise layer.error(f"tensor weight_zero_point is {found}, expected int8 [{num_out}, {num_groups}]")
    return zeros.short() + (1 << (bits - 1))


def _unsigned(signed: Tensor, bits: int) -> Tensor:
    """Shift int8 codes to begin at 0, as uint8."""
    return (signed.short() + (1 << (bits - 1))).to(torch.uint8)


_SHAPES: Final = {"awq": _awq_shape, "gptq": _gptq_shape, "compressed-tensors": _compressed_shape}
_UNPACK: Final = {"awq": _unpack_awq, "gptq": _unpack_gptq, "compressed-tensors": _unpack_compressed}
_COMPANIONS: Final[dict[str, tuple[str, ...]]] = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": (
        "weight_packed",
        "weight_shape",
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
        # Of rounded activations, which stay as they are here.
        "input_scale",
        "input_zero_point",
    ),
}
