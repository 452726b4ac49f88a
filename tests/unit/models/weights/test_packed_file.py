"""The file format of packed weights: what was written comes back, and anything else is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash

from serve.kernels.packed_weight import PackedWeight
from serve.kernels.quantized_weight import AffineBlocks, QuantizedBlocks, QuantizedWeight, pack_affine, pack_blocks
from serve.models.weights.packed_file import DamagedFile, MatrixRecord, PackedFile, PackedMatrix, lay_out

HEAD = struct.Struct("<8sIIQ16s")


def quantized(type_name: str, raw_bytes: int, num_in: int, *, seed: int) -> QuantizedWeight:
    rows = torch.randint(0, 256, (21, raw_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return pack_blocks(QuantizedBlocks(rows, type_name, num_in))


@pytest.fixture(scope="module")
def matrices() -> dict[str, tuple[PackedMatrix, ...]]:
    """A layer of two block types, one of floats, and one tensor that fills whole pages."""
    generator = torch.Generator().manual_seed(5)
    return {
        "qkv": (quantized("Q4_1", 60, 96, seed=1), quantized("Q8_0", 102, 96, seed=2)),
        "k_type": (quantized("Q4_K", 144, 256, seed=3),),
        "out": (PackedWeight(torch.randn(3, 7, 16, generator=generator), 39, 7),),
        "half": (
            PackedWeight(torch.randn(3, 4, 16, 2, generator=generator).bfloat16(), 39, 7),
            PackedWeight(torch.randn(3, 7, 16, generator=generator).half(), 39, 7),
        ),
        "page": (PackedWeight(torch.randn(1, 64, 16, generator=generator), 16, 64),),
    }


@pytest.fixture
def path(tmp_path: Path, matrices: dict[str, tuple[PackedMatrix, ...]]) -> Path:
    path = tmp_path / "weights"
    with path.open("wb") as sink:
        lay_out("key", matrices).write(sink)
    return path


def test_what_was_written_comes_back_bit_by_bit(path: Path, matrices: dict[str, tuple[PackedMatrix, ...]]) -> None:
    file = PackedFile(path, "key")
    for name, parts in matrices.items():
        found = file.take(name)
        assert found is not None
        assert len(found) == len(parts)
        for part, original in zip(found, parts, strict=True):
            assert type(part) is type(original)
            assert (part.num_out, part.num_in) == (original.num_out, original.num_in)
            assert torch.equal(part.data.view(torch.uint8), original.data.view(torch.uint8))
        assert [getattr(part, "type_name", None) for part in found] == [getattr(p, "type_name", None) for p in parts]
    assert file.take("absent") is None
    assert file.num_bytes == path.stat().st_size


def test_every_field_of_a_matrix_has_a_place_in_the_file() -> None:
    """A field that the file does not know would be lost without a word."""
    known = set(MatrixRecord.__struct_fields__)
    for kind in (QuantizedWeight, PackedWeight):
        assert {field.name for field in fields(kind)} <= known


def test_tensors_begin_on_pages(path: Path, matrices: dict[str, tuple[PackedMatrix, ...]]) -> None:
    file = PackedFile(path, "key")
    addresses = [part.data.data_ptr() for name in matrices for part in file.take(name) or ()]
    assert len(addresses) == 7
    assert all(address % 4096 == 0 for address in addresses)


def test_weights_outlive_the_file_object_and_its_name(
    path: Path, matrices: dict[str, tuple[PackedMatrix, ...]]
) -> None:
    found = PackedFile(path, "key").take("out")
    path.unlink()
    assert found is not None
    assert torch.equal(found[0].data, matrices["out"][0].data)


def test_a_change_of_the_weights_in_memory_leaves_the_file_as_it_was(path: Path) -> None:
    before = path.read_bytes()
    found = PackedFile(path, "key").take("out")
    assert found is not None
    found[0].data.zero_()
    assert path.read_bytes() == before


def test_a_file_without_matrices_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as sink:
        lay_out("key", {}).write(sink)
    assert PackedFile(path, "key").take("any") is None


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_changed_bit_of_the_payload_is_found(path: Path, place: str) -> None:
    raw = bytearray(path.read_bytes())
    # Page 1 and the last one are full of one tensor's bytes; tensors between them end before their pages do.
    index = {"first": 4096, "middle": 2 * 4096 + 5, "last": len(raw) - 1}[place]
    raw[index] ^= 1
    path.write_bytes(raw)
    file = PackedFile(path, "key")
    with pytest.raises(DamagedFile, match="have changed"):
        _ = [file.take(name) for name in ("qkv", "k_type", "out", "page")]


def test_every_changed_byte_before_the_payload_is_found(path: Path) -> None:
    raw = path.read_bytes()
    front = HEAD.size + int.from_bytes(raw[12:16], "little")
    for index in range(front):
        changed = bytearray(raw)
        changed[index] ^= 0x41
        path.write_bytes(changed)
        with pytest.raises(DamagedFile):
            PackedFile(path, "key")


@pytest.mark.parametrize("length", [0, 7, 39, 40, 4096, 8191, -4096, -1])
def test_a_truncated_file_is_refused(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamagedFile):
        PackedFile(path, "key")


def test_a_longer_file_is_refused(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(4096))
    with pytest.raises(DamagedFile, match="bytes, not"):
        PackedFile(path, "key")


def test_another_key_is_refused(path: Path) -> None:
    with pytest.raises(DamagedFile, match="other weights"):
        PackedFile(path, "key2")


def test_another_version_is_named(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[8] = 9
    path.write_bytes(raw)
    with pytest.raises(DamagedFile, match="version 9, not 1"):
        PackedFile(path, "key")


def forge(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Write a sound file whose table says something else about the matrix `out`."""
    raw = path.read_bytes()
    magic, version, table_bytes, payload_bytes, _ = HEAD.unpack(raw[: HEAD.size])
    table = msgspec.msgpack.decode(raw[HEAD.size : HEAD.size + table_bytes])
    change(table["matrices"]["out"][0])
    encoded = msgspec.msgpack.encode(table)
    head = struct.pack("<8sIIQ", magic, version, len(encoded), payload_bytes)
    front = head + xxhash.xxh3_128_digest(head + encoded) + encoded
    front += bytes(-len(front) % 4096)
    path.write_bytes(front + raw[len(raw) - payload_bytes :])


def set_data(name: str, value: object) -> Callable[[dict[str, object]], None]:
    def change(matrix: dict[str, object]) -> None:
        data = matrix["data"]
        assert isinstance(data, dict)
        data[name] = value

    return change


def set_field(name: str, value: object) -> Callable[[dict[str, object]], None]:
    return lambda matrix: matrix.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_data("offset", 1 << 40), "outside"),
        (set_data("offset", -4096), "outside"),
        (set_data("offset", 64), "outside"),
        (set_data("shape", [3, 7, 1 << 40]), "outside"),
        (set_data("shape", [3, 7, -16]), "impossible form"),
        (set_data("shape", [3, 7, 0]), "impossible form"),
        (set_data("dtype", "int16"), "impossible form"),
        (set_data("dtype", "bfloat16"), "a kernel reads"),
        (set_data("dtype", "uint8"), "weights are not uint8"),
        (set_data("shape", [7, 3, 16]), "a kernel reads"),
        (set_field("num_out", 640), "a kernel reads"),
        (set_field("num_in", 6), "a kernel reads"),
        (set_field("type_name", "Q9_9"), "Q9_9"),
        (set_field("type_name", "Q4_1"), "not whole blocks"),
        (set_data("checksum", 5), "cannot be read"),
    ],
)
def test_a_table_that_would_mislead_a_kernel_is_refused(
    path: Path, change: Callable[[dict[str, object]], None], message: str
) -> None:
    forge(path, change)
    with pytest.raises(DamagedFile, match=message):
        PackedFile(path, "key")


def test_an_unchanged_forgery_is_read(path: Path) -> None:
    """The forger itself: without a change the file it writes is sound."""
    forge(path, lambda matrix: None)
    assert PackedFile(path, "key").take("out") is not None


def mixed_inputs(*, seed: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    return pack_affine(
        AffineBlocks(
            codes=torch.randint(0, 16, (21, 96), dtype=torch.uint8, generator=generator),
            scales=torch.rand(21, 3, generator=generator),
            zeros=torch.randint(0, 16, (21, 3), dtype=torch.uint8, generator=generator),
            bits=4,
            group=32,
            input_order=torch.randperm(96, generator=generator),
        )
    )


def test_the_order_of_inputs_comes_back_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    weight = mixed_inputs(seed=1)
    assert weight.input_order is not None
    path = tmp_path / "weights"
    with path.open("wb") as sink:
        lay_out("key", {"q": (weight,), "k": (mixed_inputs(seed=2), weight)}).write(sink)
    file = PackedFile(path, "key")
    for name, place in (("q", 0), ("k", 1)):
        found = file.take(name)
        assert found is not None
        restored = found[place]
        assert isinstance(restored, QuantizedWeight)
        assert restored.input_order is not None
        assert torch.equal(restored.input_order, weight.input_order)
        assert torch.equal(restored.plain(), weight.plain())
    order = weight.input_order.numpy().tobytes()
    content = path.read_bytes()
    changed = content.replace(order, weight.input_order.flip(0).numpy().tobytes(), 1)
    assert changed != content
    path.write_bytes(changed)
    with pytest.raises(DamagedFile, match="the bytes of q have changed"):
        PackedFile(path, "key").take("q")
