"""Reads safetensors files by memory map, sharded or not.

Every offset of the header is checked against the file before a view is made.
Source: the safetensors format description (8-byte little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, TypeGuard

import numpy as np
import torch
from torch import Tensor

from serve.errors import ConfigError, ExitCode
from serve.kernels.quantized_weight import QuantizedBlocks

_MAX_HEADER_BYTES: Final = 100 << 20
# Older exports of encoders saved the numbers 0, 1, 2, ... and as many zeros as integers; they are no parameters.
_BUFFERS: Final = ("embeddings.position_ids", "embeddings.token_type_ids")
_DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# What files of quantised weights hold beside those.
_INTEGER_DTYPES: Final[dict[str, torch.dtype]] = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    file: np.memmap[tuple[int, ...], np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsSource:
    """All tensors of a set of safetensors files: floats, and integers where they are asked for."""

    def __init__(self, files: Sequence[str], *, integers: bool = False) -> None:
        self._entries: dict[str, _Entry] = {}
        dtypes = _DTYPES | _INTEGER_DTYPES if integers else _DTYPES
        for file in files:
            for name, entry in _read_header(Path(file), dtypes).items():
                if name in self._entries:
                    raise ConfigError(f"{file}: tensor {name!r} is also in another file", ExitCode.MODEL)
                self._entries[name] = entry
        self._shapes = {name: entry.shape for name, entry in self._entries.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors of the files."""
        return self._shapes

    def read(self, name: str, out: Tensor) -> None:
        """Copy a tensor to out, converting its type."""
        out.copy_(self.view(name))

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Give the file's memory when it already holds that type, aligned."""
        entry = self._entries[name]
        if entry.dtype != dtype or entry.begin % dtype.itemsize:
            return None
        return self.view(name)

    def blocks(self, name: str) -> QuantizedBlocks | None:
        """Give None: nothing is quantised here."""
        return None

    def rope_divisors(self) -> Tensor | None:
        """Give None: the format's models say in config.json how frequencies are scaled."""
        return None

    def dtype(self, name: str) -> torch.dtype:
        """Give the type that the file has."""
        return self._entries[name].dtype

    def view(self, name: str) -> Tensor:
        """Give a tensor as the file holds it, in the file's own memory where that is aligned."""
        entry = self._entries[name]
        raw = torch.from_numpy(entry.file[entry.begin : entry.end])
        if entry.begin % entry.dtype.itemsize:
            raw = raw.clone()
        return raw.view(entry.dtype).view(entry.shape)


def _read_header(path: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, _Entry]:
    """Parse and check one file's header; offsets become absolute."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise _damaged(path, f"its header claims {length} bytes of a file of {size}")
            header = json.loads(file.read(length))
        # Copy on write: torch asks for writable memory, the file is never changed.
        memory = np.memmap(path, dtype=np.uint8, mode="c")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", ExitCode.MODEL) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not an object")
    return {
        name: _entry(path, name, description, memory=memory, data_begin=8 + length, dtypes=dtypes)
        for name, description in header.items()
        if name != "__metadata__" and not name.endswith(_BUFFERS)
    }


def _entry(
    path: Path,
    name: str,
    description: object,
    *,
    memory: np.memmap[tuple[int, ...], np.dtype[np.uint8]],
    data_begin: int,
    dtypes: Mapping[str, torch.dtype],
) -> _Entry:
    if not isinstance(description, dict):
        raise _damaged(path, f"tensor {name!r} has no description")
    kind, shape, offsets = (description.get(key) for key in ("dtype", "shape", "data_offsets"))
    dtype = dtypes.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        supported = ", ".join(dtypes)
        raise ConfigError(f"{path}: tensor {name!r} has type {kind}; supported: {supported}", ExitCode.MODEL)
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(path, f"tensor {name!r} has shape {shape} and offsets {offsets}")
    begin, end = offsets
    if end - begin != prod(shape) * dtype.itemsize:
        raise _damaged(path, f"tensor {name!r} of shape {shape} has {end - begin} bytes")
    if data_begin + end > memory.size:
        raise _damaged(path, f"tensor {name!r} ends at byte {data_begin + end} of a file of {memory.size}")
    return _Entry(memory, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{path}: {problem}; the file is truncated or damaged, fetch it again", ExitCode.MODEL)
