"""Phase 6 of 11: the names of cached blocks, a hash chain over parent, token ids and extra keys.

Two blocks have the same name only when every token up to their end, the cache domain and the salt agree. The
encoding is canonical: each part is preceded by its length, so no two inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import xxhash

_ROOT_BYTES: Final = 32
# Makes a pair of keys out of the rows' digest, so that no salt, which is one key, can look like it.
_EMBEDS: Final = b"prompt_embeds"
_LENGTH: Final = struct.Struct("<I")


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


def _xxhash(message: bytes) -> bytes:
    digest: bytes = xxhash.xxh3_128_digest(message)
    return digest


_ALGORITHMS: Final[dict[str, Callable[[bytes], bytes]]] = {"sha256": _sha256, "xxhash": _xxhash}


class BlockHasher:
    """Names full blocks of token ids.

    domain separates caches that must never share (model and data type). seed None takes a random root, so that
    names cannot be guessed from outside; a text makes names equal across servers.
    """

    def __init__(self, block_size: int, *, algorithm: str, domain: str, seed: str | None = None) -> None:
        self.block_size = block_size
        self._digest = _ALGORITHMS[algorithm]
        self._pack_ids = struct.Struct(f"<{block_size}I").pack
        secret = os.urandom(_ROOT_BYTES) if seed is None else seed.encode()
        self._root = self._digest(_join((secret, domain.encode())))

    def hash_block(self, parent: bytes | None, token_ids: Sequence[int], extra_keys: Sequence[bytes] = ()) -> bytes:
        """Name one full block; parent None means the first block of a request."""
        ids = self._pack_ids(*token_ids)
        return self._digest(_join((parent or self._root, ids, *extra_keys)))

    def extend(
        self,
        block_hashes: list[bytes],
        token_ids: Sequence[int],
        cache_salt: str | None,
        prompt_embeds: np.ndarray | None = None,
    ) -> None:
        """Append the names of the full blocks of token_ids that block_hashes does not cover yet.

        The salt enters the first block only; the chain carries it to the others. The rows of prompt_embeds
        [num_prompt_tokens, hidden_size] enter the blocks that they fill.
        """
        size = self.block_size
        parent = block_hashes[-1] if block_hashes else None
        for index in range(len(block_hashes), len(token_ids) // size):
            extra_keys = [cache_salt.encode()] if index == 0 and cache_salt is not None else []
            if prompt_embeds is not None and index * size < len(prompt_embeds):
                rows = np.ascontiguousarray(prompt_embeds[index * size : (index + 1) * size])
                extra_keys += [_EMBEDS, self._digest(rows.tobytes())]
            parent = self.hash_block(parent, token_ids[index * size : (index + 1) * size], extra_keys)
            block_hashes.append(parent)


def _join(parts: Sequence[bytes]) -> bytes:
    out = [_LENGTH.pack(len(parts))]
    for part in parts:
        out.append(_LENGTH.pack(len(part)))
        out.append(part)
    return b"".join(out)
