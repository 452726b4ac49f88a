"""A file of packed weights: written once, checked and mapped by every later start.

Layout, little endian: head (magic, version, bytes of the table, bytes of the payload, digest of all this and the
table), table (MessagePack), then the tensors, each at a multiple of 4096 bytes. The table says where each tensor lies
and has a checksum of it. A tensor is compared with its checksum when it is taken, so a torn or altered file costs
packing again, and never gives other weights.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from serve.kernels.packed_weight import PACKED_TYPES, PackedWeight, packed_shape
from serve.kernels.quantized_weight import QuantizedWeight, quantized_shape

ALIGNMENT: Final = 4096
_MAGIC: Final = b"SERVEPKW"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sIIQ")
_DIGEST_BYTES: Final = 16
_DTYPES: Final[dict[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float16)
}

PackedMatrix = QuantizedWeight | PackedWeight


class DamagedFile(Exception):
    """A file does not hold what it says, or not what is looked for; the message says what is wrong."""


class TensorRecord(msgspec.Struct, frozen=True):
    """Where a tensor lies. offset is in bytes from the start of the payload."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * _DTYPES[self.dtype].itemsize


class MatrixRecord(msgspec.Struct, frozen=True):
    """A packed matrix. type_name is a block type, or empty for weights that are numbers."""

    type_name: str
    num_out: int
    num_in: int
    data: TensorRecord
    input_order: TensorRecord | None = None

    @property
    def tensors(self) -> tuple[TensorRecord, ...]:
        """All tensors of the matrix."""
        return (self.data,) if self.input_order is None else (self.data, self.input_order)


class _Table(msgspec.Struct, frozen=True):
    key: str
    matrices: dict[str, tuple[MatrixRecord, ...]]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A file before it is written: its bytes before the payload, and the tensors in order."""

    front: bytes
    tensors: list[Tensor]
    num_bytes: int

    def write(self, sink: BinaryIO) -> None:
        """Write the file."""
        sink.write(self.front)
        for tensor in self.tensors:
            raw = _raw(tensor)
            sink.write(raw)
            sink.write(bytes(-raw.nbytes % ALIGNMENT))


def lay_out(key: str, matrices: Mapping[str, Sequence[PackedMatrix]]) -> PackedLayout:
    """Plan the file of matrices under their names; reads all of them for their checksums."""
    tensors: list[Tensor] = []
    offset = 0

    def place(tensor: Tensor) -> TensorRecord:
        nonlocal offset
        raw = _raw(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        record = TensorRecord(dtype, tuple(tensor.shape), offset, _checksum(raw))
        tensors.append(tensor)
        offset += _aligned(raw.nbytes)
        return record

    def describe(part: PackedMatrix) -> MatrixRecord:
        if isinstance(part, PackedWeight):
            return MatrixRecord("", part.num_out, part.num_in, place(part.data))
        order = None if part.input_order is None else place(part.input_order)
        return MatrixRecord(part.type_name, part.num_out, part.num_in, place(part.data), order)

    records = {name: tuple(describe(part) for part in parts) for name, parts in matrices.items()}
    table = msgspec.msgpack.encode(_Table(key, records))
    head = _HEAD.pack(_MAGIC, _VERSION, len(table), offset)
    front = head + _checksum(head + table) + table
    front += bytes(-len(front) % ALIGNMENT)
    return PackedLayout(front, tensors, len(front) + offset)


class PackedFile:
    """A file opened for reading: its table is checked, its tensors are when they are taken."""

    def __init__(self, path: Path, key: str) -> None:
        """Map the file. Raises DamagedFile when it is not the whole file written for the key, OSError when absent."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._matrices = _read_table(file, size, key)
            # Copy on write: torch asks for writable memory, the file is never changed.
            self._memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        # Where the disk must be read, it is read ahead of the threads that check.
        self._memory.madvise(mmap.MADV_WILLNEED)
        self.num_bytes = size
        self._payload_begin = size - _payload_bytes(self._matrices)

    def take(self, name: str) -> tuple[PackedMatrix, ...] | None:
        """Give the matrices under a name, in the file's own memory; None when there are none.

        Raises DamagedFile when their bytes are not those that were written.
        """
        records = self._matrices.get(name)
        return None if records is None else tuple(self._restore(name, record) for record in records)

    def _restore(self, name: str, record: MatrixRecord) -> PackedMatrix:
        data = self._tensor(name, record.data)
        if not record.type_name:
            return PackedWeight(data, record.num_out, record.num_in)
        order = None if record.input_order is None else self._tensor(name, record.input_order)
        return QuantizedWeight(data, record.type_name, record.num_out, record.num_in, order)

    def _tensor(self, name: str, record: TensorRecord) -> Tensor:
        begin = self._payload_begin + record.offset
        raw = np.frombuffer(self._memory, np.uint8, record.num_bytes, begin)
        if _checksum(raw.data) != record.checksum:
            raise DamagedFile(f"the bytes of {name} have changed")
        return torch.from_numpy(raw).view(_DTYPES[record.dtype]).view(record.shape)


def _read_table(file: BinaryIO, size: int, key: str) -> dict[str, tuple[MatrixRecord, ...]]:
    """Read and check what lies before the payload."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or head[: len(_MAGIC)] != _MAGIC:
        raise DamagedFile("it is no file of packed weights")
    _, version, table_bytes, payload_bytes = _HEAD.unpack(head)
    if version != _VERSION:
        raise DamagedFile(f"it has version {version}, not {_VERSION}")
    front_bytes = _aligned(_HEAD.size + _DIGEST_BYTES + table_bytes)
    if size != front_bytes + payload_bytes:
        raise DamagedFile(f"it has {size} bytes, not {front_bytes + payload_bytes}")
    digest = file.read(_DIGEST_BYTES)
    table = file.read(table_bytes)
    if _checksum(head + table) != digest:
        raise DamagedFile("its table has changed")
    try:
        decoded = msgspec.msgpack.decode(table, type=_Table)
    except msgspec.DecodeError as error:
        raise DamagedFile(f"its table cannot be read: {error}") from None
    if decoded.key != key:
        raise DamagedFile("it was written for other weights")
    for name, records in decoded.matrices.items():
        for record in records:
            _check_record(name, record, payload_bytes)
    if _payload_bytes(decoded.matrices) != payload_bytes:
        raise DamagedFile("its payload has another length than its table says")
    return decoded.matrices


def _check_record(name: str, record: MatrixRecord, payload_bytes: int) -> None:
    """Refuse a record whose tensors lie outside the payload, or are not what a kernel would read."""
    for tensor in record.tensors:
        if tensor.dtype not in _DTYPES or min(tensor.shape, default=0) < 1:
            raise DamagedFile(f"{name} has the impossible form {tensor.dtype} {list(tensor.shape)}")
        if tensor.offset < 0 or tensor.offset % ALIGNMENT or tensor.offset + tensor.num_bytes > payload_bytes:
            raise DamagedFile(f"{name} lies outside the file")
    try:
        expected = _form(record)
    except (KeyError, ValueError) as error:
        raise DamagedFile(f"{name} cannot be of type {record.type_name or 'float'}: {error}") from None
    data, order = record.data, record.input_order
    if (data.dtype, data.shape) != expected:
        raise DamagedFile(
            f"{name} is {data.dtype} {list(data.shape)}, a kernel reads {expected[0]} {list(expected[1])}"
        )
    if order is not None and (order.dtype, order.shape) != ("int64", (record.num_in,)):
        raise DamagedFile(f"{name} has an order of inputs of {order.dtype} {list(order.shape)}")


def _form(record: MatrixRecord) -> tuple[str, tuple[int, ...]]:
    """Give the type and shape that the matrix's data must have."""
    if record.type_name:
        return "uint8", quantized_shape(record.type_name, record.num_out, record.num_in)
    dtype = _DTYPES[record.data.dtype]
    if dtype not in PACKED_TYPES:
        raise ValueError(f"weights are not {record.data.dtype}")
    return record.data.dtype, packed_shape(record.num_out, record.num_in, dtype)


def _payload_bytes(matrices: Mapping[str, Sequence[MatrixRecord]]) -> int:
    tensors = [tensor for parts in matrices.values() for record in parts for tensor in record.tensors]
    return max((tensor.offset + _aligned(tensor.num_bytes) for tensor in tensors), default=0)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _raw(tensor: Tensor) -> memoryview:
    """Give a contiguous tensor's bytes."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _checksum(raw: bytes | memoryview) -> bytes:
    """Give the checksum of bytes, at the speed of memory; it finds accidents, not forgeries."""
    digest: bytes = xxhash.xxh3_128_digest(raw)
    return digest
