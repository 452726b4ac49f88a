"""Prompts given as embeddings: base64 of a safetensors file, or of a raw array, becomes float32 rows.

Both forms are plain numbers with a declared type and shape; nothing in them is executed, and every size is checked
against the bytes that came before anything is built.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from serve.errors import InvalidRequest

_MAX_HEADER_BYTES: Final = 1 << 16
_LENGTH_BYTES: Final = 8
# Names as safetensors writes them (upper case) and as numpy and torch do, with the bytes of one element.
_ELEMENT_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}
_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", **{name: name for name in _ELEMENT_BYTES}}
_FORMS: Final = (
    'send base64 of a safetensors file with one tensor, or {"dtype": "float32", "shape": [tokens, hidden_size], '
    '"data": base64 of the little-endian array}'
)


@dataclass(frozen=True, slots=True)
class EmbeddedPrompt:
    """A prompt given as embeddings, float32 [num_tokens, hidden_size]."""

    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


class _RawArray(msgspec.Struct):
    """An array beside its description."""

    dtype: str
    shape: list[int]
    data: str


class _TensorEntry(msgspec.Struct):
    """One entry of a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def decode_all(value: object, hidden_size: int | None) -> list[EmbeddedPrompt]:
    """Read the field prompt_embeds: one prompt or a list of them. hidden_size None means that they are not taken."""
    if hidden_size is None:
        raise InvalidRequest(
            "prompt_embeds is not accepted by this server; start it with --enable-prompt-embeds", param="prompt_embeds"
        )
    if not isinstance(value, list):
        return [decode_prompt_embeds(value, hidden_size, param="prompt_embeds")]
    if not value:
        raise InvalidRequest("prompt_embeds must not be an empty list", param="prompt_embeds")
    return [decode_prompt_embeds(item, hidden_size, param=f"prompt_embeds.{i}") for i, item in enumerate(value)]


def decode_prompt_embeds(value: object, hidden_size: int, *, param: str) -> EmbeddedPrompt:
    """Read one prompt. Raises InvalidRequest.

    A leading axis of length 1 is dropped.
    """
    try:
        if isinstance(value, str):
            dtype, shape, data = _read_safetensors(_decode_base64(value))
        else:
            raw = msgspec.convert(value, _RawArray)
            dtype, shape, data = raw.dtype, raw.shape, _decode_base64(raw.data)
        rows = _to_float32(dtype, shape, data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"{param} cannot be read: {error}; {_FORMS}", param=param) from None
    if rows.ndim == 3 and rows.shape[0] == 1:
        rows = rows[0]
    if rows.ndim != 2 or rows.shape[1] != hidden_size or len(rows) == 0:
        raise InvalidRequest(
            f"{param} has shape {list(rows.shape)}; this model takes [tokens, {hidden_size}] with at least one token",
            param=param,
        )
    if not np.isfinite(rows).all():
        raise InvalidRequest(f"{param} holds NaN or infinity; send finite numbers", param=param)
    return EmbeddedPrompt(rows)


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("it is not base64") from None


def _read_safetensors(content: bytes) -> tuple[str, list[int], bytes]:
    """Take apart a safetensors file that holds one tensor: type, shape and bytes."""
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if len(content) < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, len(content) - _LENGTH_BYTES):
        raise ValueError("it is not a safetensors file")
    header = msgspec.json.decode(content[_LENGTH_BYTES:start], type=dict[str, msgspec.Raw])
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    if len(entries) != 1:
        raise ValueError(f"the safetensors file holds {len(entries)} tensors instead of one")
    tensor = msgspec.json.decode(entries[0], type=_TensorEntry)
    begin, end = tensor.data_offsets
    if not 0 <= begin <= end <= len(content) - start:
        raise ValueError("the safetensors file is shorter than its header says")
    return tensor.dtype, tensor.shape, content[start + begin : start + end]


def _to_float32(dtype: str, shape: list[int], data: bytes) -> np.ndarray:
    kind = _DTYPES.get(dtype.removeprefix("torch."))
    if kind is None:
        raise ValueError(f"dtype {dtype[:40]!r} is not one of float32, bfloat16, float16")
    num_elements = 1
    for length in shape[:4]:
        num_elements *= length
    if not 1 <= len(shape) <= 3 or min(shape) < 0 or num_elements * _ELEMENT_BYTES[kind] != len(data):
        raise ValueError(f"shape {shape[:4]} of {dtype} does not fill the {len(data)} bytes of data")
    if kind == "F32":
        values = np.frombuffer(data, dtype="<f4")
    elif kind == "F16":
        values = np.frombuffer(data, dtype="<f2").astype(np.float32)
    else:
        values = (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return values.reshape(shape)
