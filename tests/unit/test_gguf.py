"""serve/gguf.py: headers as the specification describes them, and damaged ones refused cheaply."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from serve.errors import ConfigError, ExitCode
from serve.gguf import GGML_TYPES, read_gguf_header

F32 = gguf.GGMLQuantizationType.F32
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_sample(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("sample.count", 7)
    writer.add_int64("sample.negative", -5)
    writer.add_float32("sample.share", 0.25)
    writer.add_bool("sample.flag", True)
    writer.add_string("sample.text", "gr\u00fc\u00dfe")
    writer.add_array("sample.words", ["a", "", "\u4f60"])
    writer.add_array("sample.ids", [3, 1, 2])
    writer.add_array("sample.scores", [0.5, -1.0])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("packed", gguf.quants.quantize(np.ones((4, 64), np.float32), Q8_0), raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def file_of(*parts: bytes, num_tensors: int = 0, num_entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_gguf_header(path)
    assert caught.value.exit_code == ExitCode.MODEL
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_metadata_has_the_values_that_were_written(tmp_path: Path) -> None:
    write_sample(tmp_path / "m.gguf")
    header = read_gguf_header(tmp_path / "m.gguf")
    assert header.get_str("general.architecture") == "llama"
    assert header.get_int("sample.count") == 7
    assert header.get_int("sample.negative") == -5
    assert header.metadata["sample.share"] == 0.25
    assert header.metadata["sample.flag"] is True
    assert header.get_str("sample.text") == "gr\u00fc\u00dfe"
    assert header.metadata["sample.words"] == ["a", "", "\u4f60"]
    assert header.metadata["sample.ids"] == [3, 1, 2]
    assert header.metadata["sample.scores"] == [0.5, -1.0]
    assert header.get_str("sample.absent") is None


def test_tensor_table_agrees_with_the_reference_reader(tmp_path: Path) -> None:
    write_sample(tmp_path / "m.gguf")
    header = read_gguf_header(tmp_path / "m.gguf")
    reference = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert list(header.tensors) == list(reference)
    for name, info in header.tensors.items():
        assert info.shape == tuple(int(n) for n in reversed(reference[name].shape))
        assert info.type.name == reference[name].tensor_type.name
        assert (info.offset, info.nbytes) == (reference[name].data_offset, reference[name].n_bytes)


def test_block_sizes_agree_with_the_reference_table() -> None:
    for type_id, kind in GGML_TYPES.items():
        reference = gguf.GGMLQuantizationType(type_id)
        assert kind.name == reference.name
        assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[reference]


def test_getter_of_another_type_names_the_key(tmp_path: Path) -> None:
    write_sample(tmp_path / "m.gguf")
    header = read_gguf_header(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"sample\.text is not an integer"):
        header.get_int("sample.text")
    with pytest.raises(ConfigError, match=r"sample\.count is not a string"):
        header.get_str("sample.count")


def test_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(100_000)]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list(tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    begin = time.process_time()
    header = read_gguf_header(tmp_path / "m.gguf")
    assert time.process_time() - begin < 0.5
    assert header.metadata["tokenizer.ggml.tokens"] == tokens


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a GGUF file"),
        (b"GGUF", "truncated"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (file_of(version=1), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (file_of(num_tensors=1 << 62), "cannot fit"),
        (file_of(num_entries=(1 << 64) - 1), "cannot fit"),
        (file_of(struct.pack("<Q", (1 << 64) - 1), b"k" * 8, num_entries=1), "truncated"),
        (file_of(text(b"k"), struct.pack("<I", 99), bytes(8), num_entries=1), "unknown value type 99"),
        (file_of(text(b"k"), struct.pack("<IIQ", 9, 4, 1 << 40), num_entries=1), "cannot fit"),
        (file_of(text(b"k"), struct.pack("<IIQ", 9, 8, 2), text(b"a"), b"\xff" * 8, num_entries=1), "past the end"),
        (file_of(text(b"k"), struct.pack("<IIQ", 9, 8, 1), text(b"\xff\xfe"), num_entries=1), "UTF-8"),
        (file_of(text(b"\xff"), struct.pack("<II", 4, 1), num_entries=1), "UTF-8"),
        (file_of(*[text(b"k") + struct.pack("<II", 4, 1)] * 2, num_entries=2), "appears twice"),
        (
            file_of(text(b"general.alignment"), struct.pack("<II", 4, 0), num_entries=1),
            "general.alignment 0 is not a positive multiple of 8",
        ),
    ],
)
def test_damaged_header_is_refused_with_its_reason(tmp_path: Path, content: bytes, problem: str) -> None:
    assert problem in refusal(tmp_path, content)


def tensor(name: bytes, dims: tuple[int, ...], type_id: int, offset: int) -> bytes:
    return (
        text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", type_id, offset)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("infos", "problem"),
    [
        ([tensor(b"t", (1 << 62, 1 << 62), 0, 0)], "truncated"),
        ([tensor(b"t", (4,), 0, 1 << 63)], "truncated"),
        ([tensor(b"t", (4,), 0, 5)], "not a multiple of 32"),
        ([tensor(b"t", (), 0, 0)], "0 dimensions"),
        ([tensor(b"t", (1, 1, 1, 1, 1), 0, 0)], "5 dimensions"),
        ([tensor(b"t", (33,), 8, 0)], "impossible shape"),
        ([tensor(b"t", (0,), 0, 0)], "impossible shape"),
        ([tensor(b"t", (4,), 16, 0)], "IQ2_XXS, which is not supported; supported: F32"),
        ([tensor(b"t", (4,), 0, 0), tensor(b"u", (4,), 0, 0)], "overlap"),
        ([tensor(b"t", (4,), 0, 0), tensor(b"t", (4,), 0, 32)], "same name"),
    ],
)
def test_impossible_tensor_is_refused_with_its_reason(tmp_path: Path, infos: list[bytes], problem: str) -> None:
    content = file_of(*infos, num_tensors=len(infos))
    assert problem in refusal(tmp_path, content + bytes(256))


def test_unreadable_path_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_gguf_header(tmp_path / "absent.gguf")


def test_thousands_of_damaged_files_cost_little_time_and_memory(tmp_path: Path) -> None:
    write_sample(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    random_ = random.Random(1)
    path = tmp_path / "mutant.gguf"
    slowest, num_refused = 0.0, 0
    tracemalloc.start()
    for number in range(3000):
        mutant = bytearray(whole)
        for _ in range(random_.randint(1, 4)):
            mutant[random_.randrange(4, 420)] = random_.choice((0, 1, 0x7F, 0x80, 0xFF, random_.randrange(256)))
        path.write_bytes(mutant[: random_.randrange(8, len(whole))] if number % 3 == 0 else mutant)
        begin = time.process_time()
        try:
            read_gguf_header(path)
        except ConfigError:
            num_refused += 1
        slowest = max(slowest, time.process_time() - begin)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_refused > 1000
    assert slowest < 1.0
    assert peak < 4 << 20
