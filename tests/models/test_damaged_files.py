"""A corpus of damaged GGUF files: each loads, or is refused by one clear error, and never takes memory on its word.

The corpus is made from a file that a public writer wrote: cut at and around every structural edge, and with every
count, length, type, size and offset of its header replaced by small, large and impossible numbers.
"""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import gguf

from serve.checkpoint import load_checkpoint
from serve.errors import ConfigError
from serve.renderers.tokenizer import load_tokenizer
from tests.checkpoints import write_gguf
from tests.models.harness import load

SIZES: Final = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
}
MAX_MODEL_LEN: Final = 64
# What loading the whole file takes, many times over; a believed count of 2^31 would be far above it.
MOST_MEMORY_KIB: Final = 200 << 10
MOST_SECONDS: Final = 20.0
WILD: Final = (
    0,
    1,
    2,
    3,
    255,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 62,
    (1 << 63) + 1,
    (1 << 64) - 1,
)
TYPES: Final = (*range(14), 30, 39, 99, (1 << 32) - 1)
EDGES_AFTER: Final = (0, 1, 7)


class Walker:
    """Lists the places of a sound GGUF file by walking it as the specification says."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._pos = 4
        self.edges: list[int] = []
        self.words: list[int] = []  # places of 32-bit types and counts of dimensions
        self.longs: list[int] = []  # places of 64-bit counts, lengths, sizes and offsets
        self.numbers: dict[str, tuple[int, str]] = {}  # metadata key -> place and form of its number

    def walk(self) -> None:
        self._word()
        num_tensors, num_entries = self._long(), self._long()
        for _ in range(num_entries):
            self._entry()
        for _ in range(num_tensors):
            self._tensor()
        self.edges.append(self._pos)

    def _entry(self) -> None:
        self.edges.append(self._pos)
        key = self._text()
        self._value(key, self._word())

    def _value(self, key: str, kind: int) -> None:
        forms = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
        if kind == 8:
            self._text()
        elif kind == 9:
            item, count = self._word(), self._long()
            before = len(self.longs)
            for _ in range(count):
                self._value(key, item)
            # The lengths of a long list are all alike: three of them stand for the rest.
            del self.longs[before + 3 :]
        else:
            self.numbers.setdefault(key, (self._pos, forms[kind]))
            self._pos += struct.calcsize(forms[kind])

    def _tensor(self) -> None:
        self.edges.append(self._pos)
        self._text()
        for _ in range(self._word()):
            self._long()
        self._word()
        self._long()

    def _word(self) -> int:
        self.words.append(self._pos)
        self._pos += 4
        return int(struct.unpack_from("<I", self._content, self._pos - 4)[0])

    def _long(self) -> int:
        self.longs.append(self._pos)
        self._pos += 8
        return int(struct.unpack_from("<Q", self._content, self._pos - 8)[0])

    def _text(self) -> str:
        length = self._long()
        self._pos += length
        return self._content[self._pos - length : self._pos].decode()


def corpus(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Give damaged versions of a file, each with a word about the damage."""
    walker = Walker(content)
    walker.walk()

    def with_bytes(place: int, new: bytes) -> bytes:
        return content[:place] + new + content[place + len(new) :]

    for edge in walker.edges:
        for after in EDGES_AFTER:
            yield f"cut at {edge + after}", content[: edge + after]
    yield "cut inside the tensors", content[:-100]
    for place in walker.words:
        for kind in TYPES:
            yield f"word at {place} is {kind}", with_bytes(place, struct.pack("<I", kind))
    for place in walker.longs:
        for number in WILD:
            yield f"long at {place} is {number}", with_bytes(place, struct.pack("<Q", number))
    for key, (place, form) in walker.numbers.items():
        size = struct.calcsize(form)
        for number in WILD:
            wild = number & ((1 << 8 * size) - 1)
            yield f"{key} is {wild}", with_bytes(place, wild.to_bytes(size, "little"))
        if form in "fd":
            for real in (float("nan"), float("inf"), -1.0, 1e-38):
                yield f"{key} is {real}", with_bytes(place, struct.pack("<" + form, real))
    for edge in walker.edges:
        yield f"not UTF-8 at {edge}", with_bytes(edge + 8, b"\xff\xfe")


def peak_memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def load_all(path: Path) -> str:
    """Load description, tokenizer and weights; give the refusal, empty when the file loads."""
    try:
        load_tokenizer(load_checkpoint(path), None)
        load(path, max_model_len=MAX_MODEL_LEN)
    except ConfigError as error:
        return str(error)
    return ""


def test_damaged_files_load_or_are_refused_by_name(tmp_path: Path) -> None:
    sound = tmp_path / "sound.gguf"
    write_gguf(sound, "llama", kind=gguf.GGMLQuantizationType.Q4_0, **SIZES)
    content = sound.read_bytes()
    assert load_all(sound) == ""
    path = tmp_path / "damaged.gguf"
    before = peak_memory_kib()
    num_refused = 0
    for damage, mutant in corpus(content):
        path.write_bytes(mutant)
        begin = time.process_time()
        problem = load_all(path)
        assert time.process_time() - begin < MOST_SECONDS, damage
        assert peak_memory_kib() - before < MOST_MEMORY_KIB, damage
        if problem:
            num_refused += 1
            assert str(path) in problem, f"{damage}: {problem}"
    assert num_refused > 500
