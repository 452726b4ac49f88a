"""Reads the header of a GGUF file: metadata and the table of tensors, never the tensors themselves.

Every count, length and offset is checked against the size of the file with Python's unbounded integers before
anything is allocated or viewed, so a damaged file costs a clear error and no memory.
Source: the GGUF specification of ggml, versions 2 and 3, little endian.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from serve.errors import ConfigError, ExitCode

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMS: Final = 4
_MAX_NESTING: Final = 4
_MIN_TENSOR_INFO_BYTES: Final = 24
_MIN_ENTRY_BYTES: Final = 13

_TYPE_STRING: Final = 8
_TYPE_ARRAY: Final = 9
# Value type number of the specification to its numpy form.
_SCALARS: Final[dict[int, np.dtype[np.generic]]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GGMLType:
    """How a tensor type stores numbers: block_bytes bytes for each block_size elements of a row."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: Final[dict[int, GGMLType]] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    30: GGMLType("BF16", 1, 2),
}
# Names of types that exist but that nothing here can read, for the message.
_OTHER_TYPES: Final[dict[int, str]] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """Where a tensor lies. shape is outermost first (rows, columns); offset is from the start of the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata and tensor table of a GGUF file.

    metadata values are bool, int, float, str or lists of them; the typed getters raise ConfigError naming the key
    when a value has another type. tensors keeps the order of the file.
    """

    path: str
    metadata: dict[str, object]
    tensors: dict[str, GGUFTensorInfo]
    data_offset: int

    def get_str(self, key: str) -> str | None:
        """Look up a string, None when the key is absent."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            self._wrong_type(key, "a string")
        return value

    def get_int(self, key: str) -> int | None:
        """Look up an integer, None when the key is absent."""
        value = self.metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            self._wrong_type(key, "an integer")
        return value

    def _wrong_type(self, key: str, expected: str) -> NoReturn:
        raise ConfigError(f"{self.path}: metadata {key} is not {expected}; the file is damaged", ExitCode.MODEL)


def read_gguf_header(path: str | Path) -> GGUFHeader:
    """Read metadata and tensor table.

    Raises ConfigError (exit code MODEL) that names the file and what is wrong, also for a file that cannot be read.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(8)
            if head[:4] != _MAGIC:
                raise ConfigError(f"{path}: not a GGUF file (it does not start with GGUF)", ExitCode.MODEL)
            # A map instead of a read: the header's length is only known after parsing it.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Parser(str(path), view).parse()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", ExitCode.MODEL) from error


class _Parser:
    """A cursor over the bytes of one file."""

    def __init__(self, path: str, view: mmap.mmap) -> None:
        self._path = path
        self._view = view
        self._size = len(view)
        self._pos = len(_MAGIC)

    def parse(self) -> GGUFHeader:
        version = self._uint32()
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = "a big-endian file" if swapped in _VERSIONS else "convert it with a newer tool"
            self._fail(f"GGUF version {version} is not supported ({hint}); supported: 2, 3 little-endian")
        num_tensors = self._uint64()
        num_entries = self._uint64()
        self._check_count("tensors", num_tensors, _MIN_TENSOR_INFO_BYTES)
        self._check_count("metadata entries", num_entries, _MIN_ENTRY_BYTES)
        metadata: dict[str, object] = {}
        for _ in range(num_entries):
            key = self._string("a metadata key")
            if key in metadata:
                self._fail(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(key, self._uint32(), 0)
        infos, data_offset = self._tensor_table(num_tensors, self._alignment(metadata))
        return GGUFHeader(self._path, metadata, {info.name: info for info in infos}, data_offset)

    def _alignment(self, metadata: dict[str, object]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            self._fail(f"general.alignment {alignment!r} is not a positive multiple of 8")
        return alignment

    def _tensor_table(self, num_tensors: int, alignment: int) -> tuple[list[GGUFTensorInfo], int]:
        """Parse the tensor infos; returns them with offsets from the start of the file, and the data's own offset."""
        raw = [self._tensor_info() for _ in range(num_tensors)]
        data_offset = -(-self._pos // alignment) * alignment
        infos: list[GGUFTensorInfo] = []
        for info in raw:
            if info.offset % alignment:
                self._fail(f"tensor {info.name!r} starts at offset {info.offset}, not a multiple of {alignment}")
            begin = data_offset + info.offset
            if begin + info.nbytes > self._size:
                self._fail(
                    f"tensor {info.name!r} needs bytes {begin} to {begin + info.nbytes} of a file of {self._size} "
                    "bytes; the file is truncated, fetch it again"
                )
            infos.append(GGUFTensorInfo(info.name, info.shape, info.type, begin, info.nbytes))
        self._check_apart(infos)
        return infos, data_offset

    def _check_apart(self, infos: list[GGUFTensorInfo]) -> None:
        ordered = sorted(infos, key=lambda info: info.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                self._fail(f"tensors {before.name!r} and {after.name!r} overlap")
        if len({info.name for info in infos}) != len(infos):
            self._fail("two tensors have the same name")

    def _tensor_info(self) -> GGUFTensorInfo:
        name = self._string("a tensor name")
        num_dims = self._uint32()
        if not 1 <= num_dims <= _MAX_DIMS:
            self._fail(f"tensor {name!r} has {num_dims} dimensions; allowed: 1 to {_MAX_DIMS}")
        # The file has the innermost dimension first.
        shape = tuple(self._uint64() for _ in range(num_dims))[::-1]
        type_id = self._uint32()
        offset = self._uint64()
        kind = GGML_TYPES.get(type_id)
        if kind is None:
            names = ", ".join(known.name for known in GGML_TYPES.values())
            self._fail(
                f"tensor {name!r} has type {_OTHER_TYPES.get(type_id, type_id)}, which is not supported; "
                f"supported: {names}"
            )
        if 0 in shape or shape[-1] % kind.block_size:
            self._fail(f"tensor {name!r} of type {kind.name} has the impossible shape {list(shape)}")
        return GGUFTensorInfo(name, shape, kind, offset, prod(shape) // kind.block_size * kind.block_bytes)

    def _value(self, key: str, value_type: int, depth: int) -> object:
        if value_type == _TYPE_STRING:
            return self._string(f"metadata {key!r}")
        if value_type == _TYPE_ARRAY:
            return self._array(key, depth + 1)
        dtype = _SCALARS.get(value_type)
        if dtype is None:
            self._fail(f"metadata {key!r} has the unknown value type {value_type}")
        return np.frombuffer(self._take(dtype.itemsize, f"metadata {key!r}"), dtype)[0].item()

    def _array(self, key: str, depth: int) -> list[object]:
        item_type = self._uint32()
        count = self._uint64()
        if depth > _MAX_NESTING:
            self._fail(f"metadata {key!r} nests lists deeper than {_MAX_NESTING}")
        dtype = _SCALARS.get(item_type)
        self._check_count(f"items of {key!r}", count, dtype.itemsize if dtype is not None else 8)
        if dtype is not None:
            items: list[object] = np.frombuffer(self._take(count * dtype.itemsize, key), dtype).tolist()
            return items
        if item_type == _TYPE_STRING:
            return self._strings(key, count)
        return [self._value(key, item_type, depth) for _ in range(count)]

    def _strings(self, key: str, count: int) -> list[object]:
        """Parse a list of strings: a tight loop, since vocabularies and merges have 100,000 and more."""
        view, pos = self._view, self._pos
        read_length = struct.Struct("<Q").unpack_from
        pieces: list[bytes] = []
        try:
            for _ in range(count):
                begin = pos + 8
                pos = begin + read_length(view, pos)[0]
                # A length beyond the file gives a short slice here and is refused below.
                pieces.append(view[begin:pos])
        except (struct.error, OverflowError, IndexError):
            pos = self._size + 1
        if pos > self._size:
            self._fail(f"metadata {key!r} runs past the end of the file; it is truncated or damaged")
        self._pos = pos
        try:
            return [str(piece, "utf-8") for piece in pieces]
        except UnicodeDecodeError:
            self._fail(f"metadata {key!r} holds text that is not valid UTF-8")

    def _string(self, what: str) -> str:
        length = self._uint64()
        piece = self._take(length, what)
        try:
            return str(piece, "utf-8")
        except UnicodeDecodeError:
            self._fail(f"{what} is not valid UTF-8")

    def _uint32(self) -> int:
        return int.from_bytes(self._take(4, "the header"), "little")

    def _uint64(self) -> int:
        return int.from_bytes(self._take(8, "the header"), "little")

    def _take(self, num_bytes: int, what: str) -> bytes:
        end = self._pos + num_bytes
        if end > self._size:
            self._fail(
                f"{what} needs {num_bytes} bytes at offset {self._pos} of a file of {self._size} bytes; "
                "the file is truncated or damaged"
            )
        piece = self._view[self._pos : end]
        self._pos = end
        return piece

    def _check_count(self, what: str, count: int, min_bytes: int) -> None:
        if count * min_bytes > self._size - self._pos:
            self._fail(f"{count} {what} cannot fit in a file of {self._size} bytes; the file is damaged")

    def _fail(self, problem: str) -> NoReturn:
        raise ConfigError(f"{self._path}: {problem}", ExitCode.MODEL)
