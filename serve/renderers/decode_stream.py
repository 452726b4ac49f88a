"""Phase 11 of 11: turns sampled token ids into text, one token at a time, without half characters."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tokenizers import Tokenizer as Backend

REPLACEMENT_CHAR: Final = "\ufffd"
_METASPACE: Final = "\u2581"
_UTF8_MAX_BYTES: Final = 4
# Lead bytes after which not every continuation byte may follow: the others would be overlong, a surrogate, or beyond
# U+10FFFF (table 3-7 of the Unicode standard).
_SECOND_BYTES: Final = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
_ANY_CONTINUATION: Final = (0x80, 0xBF)
_MAX_PRIMING_TOKENS: Final = 16
_MAX_PENDING_TOKENS: Final = 8


class DecodeStream(Protocol):
    """Incremental text of one output: each step gives what the new token completes, or None."""

    def step(self, token_id: int) -> str | None:
        """Add one token and return the text that became certain, None when there is none yet."""


def _byte_level_table() -> dict[str, int]:
    """Give the byte behind each printable stand-in of byte-level vocabularies (GPT-2's mapping)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(visible)]
    table = {chr(b): b for b in visible}
    table.update({chr(0x100 + i): b for i, b in enumerate(hidden)})
    return table


_BYTE_OF_CHAR: Final = _byte_level_table()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with any other character stands for its own UTF-8."""
    try:
        return bytes([_BYTE_OF_CHAR[c] for c in token])
    except KeyError:
        return token.encode()


def metaspace_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token: the lower-one-eighth block is a space."""
    return token.replace(_METASPACE, " ").encode()


def byte_fallback_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token, where <0xNN> stands for one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return metaspace_bytes(token)


class TokenBytes:
    """Token id to bytes, computed at first use of each id.

    is_joinable: the text of a sequence is the UTF-8 text of the joined bytes, so a stream can work on bytes.
    strips_first_space: the decoder drops one space at the very start of a text.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        convert, strips = _classify(backend)
        self.is_joinable = convert is not None
        self.strips_first_space = strips
        self._convert = convert or metaspace_bytes

    def __getitem__(self, token_id: int) -> bytes:
        """Give the token's own bytes; empty for an id without a token."""
        raw = self._cache.get(token_id)
        if raw is None:
            raw = self._cache[token_id] = self._make(token_id)
        return raw

    def _make(self, token_id: int) -> bytes:
        try:
            token = self._backend.id_to_token(token_id)
        except OverflowError:
            return b""
        return self._convert(token) if token is not None else b""


def _classify(backend: Backend) -> tuple[Callable[[str], bytes] | None, bool]:
    """Give the token-to-bytes rule of a tokenizer's decoder (None: no per-token rule) and whether it strips."""
    decoder = backend.decoder
    if decoder is None:
        return None, False
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes, False
    if kinds == ["Metaspace"]:
        return metaspace_bytes, steps[0].get("prepend_scheme", "always") != "never"
    strips = kinds[-1:] == ["Strip"] and (steps[-1]["content"], steps[-1]["start"], steps[-1]["stop"]) == (" ", 1, 0)
    if strips:
        steps, kinds = steps[:-1], kinds[:-1]
    replaces = kinds[:1] == ["Replace"] and (steps[0]["pattern"], steps[0]["content"]) == ({"String": _METASPACE}, " ")
    if replaces and kinds[1:] in (["ByteFallback", "Fuse"], ["ByteFallback"]):
        return byte_fallback_bytes, strips
    if replaces and kinds[1:] in (["Fuse"], []):
        return metaspace_bytes, strips
    return None, False


class Utf8Stream:
    """Text of bytes that come in pieces; all pieces together give what one decode of the joined bytes gives.

    Holds back only bytes that can still become a character. Bytes that cannot give their U+FFFD at once; Python's
    own incremental decoder keeps the beginning of a surrogate, which no further byte completes.
    """

    def __init__(self) -> None:
        self._open_bytes = b""

    @property
    def has_open_bytes(self) -> bool:
        """Tell whether the bytes so far end inside a character."""
        return bool(self._open_bytes)

    def decode(self, piece: bytes) -> str:
        """Add bytes and return the text that became certain."""
        raw = self._open_bytes + piece
        end = len(raw) - _num_open_bytes(raw)
        self._open_bytes = raw[end:]
        return raw[:end].decode("utf-8", errors="replace")


def _num_open_bytes(raw: bytes) -> int:
    """Count the bytes at the end that are the beginning of a character."""
    for count in range(1, min(len(raw), _UTF8_MAX_BYTES - 1) + 1):
        lead = raw[-count]
        if 0x80 <= lead <= 0xBF:
            continue
        if count >= _num_character_bytes(lead):
            return 0
        low, high = _SECOND_BYTES.get(lead, _ANY_CONTINUATION)
        return count if count == 1 or low <= raw[1 - count] <= high else 0
    return 0


def _num_character_bytes(lead: int) -> int:
    """Give the length of a character from its first byte; 0 for a byte that begins none."""
    if lead < 0x80:
        return 1
    if 0xC2 <= lead <= 0xDF:
        return 2
    if 0xE0 <= lead <= 0xEF:
        return 3
    return 4 if 0xF0 <= lead <= 0xF4 else 0


class ByteDecodeStream:
    """Decode stream over token bytes: constant time a token, whatever the length.

    Bytes are held until they make a whole character. As soon as they cannot any more, they give the U+FFFD that a
    decode of the whole text gives for them. A character that is still open at the end is not given. The prompt
    decides only two things: the bytes of a character that it leaves open, and whether the output is the start of
    the text.
    """

    def __init__(self, table: TokenBytes, prompt_token_ids: Sequence[int], skip_ids: frozenset[int]) -> None:
        self._table = table
        self._skip_ids = skip_ids
        self._utf8 = Utf8Stream()
        self._strip_first_space = table.strips_first_space and all(
            i in skip_ids or not table[i] for i in prompt_token_ids
        )
        self._prompt_has_open_bytes = self._prime(prompt_token_ids)

    def _prime(self, prompt_token_ids: Sequence[int]) -> bool:
        tail = b""
        for token_id in reversed(prompt_token_ids[-_MAX_PRIMING_TOKENS:]):
            if token_id not in self._skip_ids:
                tail = self._table[token_id] + tail
            if len(tail) >= _UTF8_MAX_BYTES:
                break
        self._utf8.decode(tail)
        return self._utf8.has_open_bytes

    def step(self, token_id: int) -> str | None:
        """Add one token and return the text that became certain, None when there is none yet."""
        if token_id in self._skip_ids:
            return None
        text = self._utf8.decode(self._table[token_id])
        if not text:
            return None
        if self._prompt_has_open_bytes:
            # A broken character that began in the prompt is the prompt's, not the output's.
            self._prompt_has_open_bytes = False
            text = text.removeprefix(REPLACEMENT_CHAR)
        if self._strip_first_space:
            self._strip_first_space = False
            text = text.removeprefix(" ")
        return text or None


class WindowDecodeStream:
    """Decode stream for tokenizers whose text is not the joined bytes: decodes a short window twice a token.

    Gives the growth of the window's text, unless it ends in U+FFFD; after eight tokens without a whole character
    the text is given as it is. Tokens of skip_ids have no text.
    """

    def __init__(self, backend: Backend, prompt_token_ids: Sequence[int], skip_ids: frozenset[int]) -> None:
        self._backend = backend
        self._skip_ids = skip_ids
        self._window = [i for i in prompt_token_ids[-_MAX_PENDING_TOKENS:] if i not in skip_ids]
        self._num_read = len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def step(self, token_id: int) -> str | None:
        """Add one token and return the text that became certain, None when there is none yet."""
        if token_id in self._skip_ids:
            return None
        self._window.append(token_id)
        before = self._decode(self._window[: self._num_read])
        text = self._decode(self._window)
        is_open = text.endswith(REPLACEMENT_CHAR) and len(self._window) - self._num_read < _MAX_PENDING_TOKENS
        if len(text) <= len(before) or is_open:
            return None
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return text[len(before) :]
