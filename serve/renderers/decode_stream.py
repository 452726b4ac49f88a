"""Phase 11 of 11: turns sampled token ids into text, one token at a time, without half characters."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tokenizers import Tokenizer as Backend

REPLACEMENT_CHAR: Final = "\ufffd"
_METASPACE: Final = "\u2581"
_UTF8_MAX_BYTES: Final = 4
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


class ByteDecodeStream:
    """Decode stream over token bytes: constant time a token, whatever the length.

    Bytes are held until they make a whole character. A sequence that can no longer become one gives one U+FFFD,
    as in a decode of the whole text. What never completes is not given. The prompt decides only two things: the
    bytes of a character that it leaves open, and whether the output is the start of the text.
    """

    def __init__(self, table: TokenBytes, prompt_token_ids: Sequence[int], skip_ids: frozenset[int]) -> None:
        self._table = table
        self._skip_ids = skip_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
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
        return bool(self._utf8.getstate()[0])

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
    the text is given as it is.
    """

    def __init__(self, backend: Backend, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-_MAX_PENDING_TOKENS:])
        self._num_read = len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def step(self, token_id: int) -> str | None:
        """Add one token and return the text that became certain, None when there is none yet."""
        self._window.append(token_id)
        before = self._decode(self._window[: self._num_read])
        text = self._decode(self._window)
        is_open = text.endswith(REPLACEMENT_CHAR) and len(self._window) - self._num_read < _MAX_PENDING_TOKENS
        if len(text) <= len(before) or is_open:
            return None
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return text[len(before) :]
