"""Names of cached blocks: what they depend on, and the exact bytes that are hashed."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import xxhash

from serve.core.block_hash import BlockHasher


def make_hasher(seed: str | None = "seed", domain: str = "model", algorithm: str = "sha256") -> BlockHasher:
    return BlockHasher(4, algorithm=algorithm, domain=domain, seed=seed)


def hashes(hasher: BlockHasher, token_ids: list[int], salt: str | None = None) -> list[bytes]:
    out: list[bytes] = []
    hasher.extend(out, token_ids, salt)
    return out


def encoded(*parts: bytes) -> bytes:
    return struct.pack("<I", len(parts)) + b"".join(struct.pack("<I", len(part)) + part for part in parts)


def test_the_first_block_hashes_root_and_ids_and_the_second_the_first_and_its_ids() -> None:
    root = hashlib.sha256(encoded(b"seed", b"model")).digest()
    first = hashlib.sha256(encoded(root, struct.pack("<4I", 1, 2, 3, 4))).digest()
    second = hashlib.sha256(encoded(first, struct.pack("<4I", 5, 6, 7, 8))).digest()
    assert hashes(make_hasher(), [1, 2, 3, 4, 5, 6, 7, 8, 9]) == [first, second]


def test_the_salt_is_an_extra_key_of_the_first_block_only() -> None:
    root = hashlib.sha256(encoded(b"seed", b"model")).digest()
    first = hashlib.sha256(encoded(root, struct.pack("<4I", 1, 2, 3, 4), b"tenant")).digest()
    second = hashlib.sha256(encoded(first, struct.pack("<4I", 5, 6, 7, 8))).digest()
    assert hashes(make_hasher(), [1, 2, 3, 4, 5, 6, 7, 8], "tenant") == [first, second]


def test_xxhash_uses_the_same_encoding() -> None:
    root = xxhash.xxh3_128_digest(encoded(b"seed", b"model"))
    expected = xxhash.xxh3_128_digest(encoded(root, struct.pack("<4I", 1, 2, 3, 4)))
    assert hashes(make_hasher(algorithm="xxhash"), [1, 2, 3, 4]) == [expected]


def test_partial_blocks_have_no_name() -> None:
    assert hashes(make_hasher(), [1, 2, 3]) == []


def test_extending_in_pieces_gives_the_same_names() -> None:
    hasher = make_hasher()
    token_ids = list(range(40))
    out: list[bytes] = []
    for end in (3, 4, 11, 12, 13, 40):
        hasher.extend(out, token_ids[:end], "salt")
    assert out == hashes(hasher, token_ids, "salt")


@pytest.mark.parametrize(
    ("other", "num_equal"),
    [([1, 2, 3, 4, 5, 6, 7, 9], 1), ([0, 2, 3, 4, 5, 6, 7, 8], 0), ([1, 2, 3, 4, 5, 6, 7, 8], 2)],
)
def test_a_name_covers_every_token_up_to_its_end(other: list[int], num_equal: int) -> None:
    hasher = make_hasher()
    pairs = zip(hashes(hasher, [1, 2, 3, 4, 5, 6, 7, 8]), hashes(hasher, other), strict=True)
    assert [a == b for a, b in pairs] == [True] * num_equal + [False] * (2 - num_equal)


def test_salts_domains_and_seeds_separate() -> None:
    ids = [1, 2, 3, 4]
    names = [
        hashes(make_hasher(), ids)[0],
        hashes(make_hasher(), ids, "a")[0],
        hashes(make_hasher(), ids, "b")[0],
        hashes(make_hasher(domain="other"), ids)[0],
        hashes(make_hasher(seed="other"), ids)[0],
    ]
    assert len(set(names)) == len(names)


def test_without_a_seed_two_servers_never_agree() -> None:
    assert hashes(make_hasher(seed=None), [1, 2, 3, 4]) != hashes(make_hasher(seed=None), [1, 2, 3, 4])


def test_with_a_seed_two_servers_agree() -> None:
    assert hashes(make_hasher(seed="x"), [1, 2, 3, 4]) == hashes(make_hasher(seed="x"), [1, 2, 3, 4])


def embeds_hashes(rows: np.ndarray, num_tokens: int, salt: str | None = None) -> list[bytes]:
    out: list[bytes] = []
    make_hasher().extend(out, [0] * num_tokens, salt, rows)
    return out


def test_prompt_embeds_are_hashed_by_content_in_the_blocks_they_fill() -> None:
    rows = np.arange(18, dtype=np.float32).reshape(6, 3)
    other = rows.copy()
    other[5, 2] += 1
    first, second, third = embeds_hashes(rows, 12)
    assert embeds_hashes(rows.copy(), 12) == [first, second, third]
    assert embeds_hashes(other, 12)[0] == first
    assert embeds_hashes(other, 12)[1] != second
    assert hashes(make_hasher(), [0] * 12)[0] != first
    assert embeds_hashes(rows, 12, "tenant")[0] != first


def test_no_salt_looks_like_the_key_of_embeds() -> None:
    rows = np.zeros((4, 1), dtype=np.float32)
    digest = hashlib.sha256(rows.tobytes()).digest()
    root = hashlib.sha256(encoded(b"seed", b"model")).digest()
    ids = struct.pack("<4I", 0, 0, 0, 0)
    assert embeds_hashes(rows, 4) == [hashlib.sha256(encoded(root, ids, b"prompt_embeds", digest)).digest()]
