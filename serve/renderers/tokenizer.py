"""Phase 1 of 11: the tokenizer: text to token ids and back, the same for every kind of vocabulary file."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from tokenizers import Tokenizer as Backend

from serve.checkpoint import Checkpoint
from serve.errors import ConfigError, ExitCode
from serve.gguf import read_gguf_header
from serve.renderers.backend import TokenizerParts
from serve.renderers.decode_stream import ByteDecodeStream, DecodeStream, TokenBytes, WindowDecodeStream
from serve.renderers.gguf_vocab import build_gguf_tokenizer
from serve.renderers.tokenizer_files import load_folder

log = logging.getLogger(__name__)

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# With a limit, only (limit + 64) * 8 characters are tokenized at first; more than limit * 9/8 + 64 tokens in them
# prove the whole text too long, whatever the tokens at the cut become. Else four times as many are tried.
_PROBE_CHARS_PER_TOKEN: Final = 8
_PROBE_SLACK: Final = 64
_PROBE_GROWTH: Final = 4


class Tokenizer(Protocol):
    """Text to token ids and back. All methods may be called from any thread.

    vocab_size counts added tokens; max_token_id is the largest id with a token. max_chars_per_token bounds the
    text behind one token. special_tokens (bos_token, eos_token, ...) are the texts that templates see.
    """

    vocab_size: int
    max_token_id: int
    eos_token_id: int | None
    bos_token_id: int | None
    max_chars_per_token: int
    all_special_ids: frozenset[int]
    chat_template: str | dict[str, str] | None
    special_tokens: dict[str, str]

    def encode(self, text: str, *, add_special_tokens: bool, max_length: int | None = None) -> list[int]:
        """Tokenize; with max_length give at most that many ids (the first), without the cost of the rest."""

    def encode_texts(
        self, texts: tuple[str, ...], *, add_special_tokens: bool, keep: int | None, side: str
    ) -> tuple[list[int], list[int]]:
        """Tokenize one text or two as one prompt; gives token ids and the number of the segment of each.

        keep is the most tokens of text that remain, special ones not counted; side left drops the beginning of a text.
        """

    def num_added_tokens(self, *, is_pair: bool) -> int:
        """Give how many special tokens are added to one text or to two."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
    ) -> str:
        """Give the text of a sequence; ids without a token have no text."""

    def token_to_bytes(self, token_id: int) -> bytes:
        """Give the token's own bytes, also for a part of a character; empty for an id without a token."""

    def id_to_token(self, token_id: int) -> str:
        """Give the token as the vocabulary spells it; empty for an id without a token."""

    def token_to_id(self, token: str) -> int | None:
        """Give the id of a token as the vocabulary spells it."""

    def new_decode_stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, visible_token_ids: Sequence[int] = ()
    ) -> DecodeStream:
        """Start the incremental text of an output that follows a prompt; visible_token_ids are never skipped."""


class FastTokenizer:
    """A Tokenizer over the tokenizers library; everything that needs the whole vocabulary is computed here, once."""

    def __init__(self, parts: TokenizerParts, default_eos_id: int | None = None) -> None:
        """Wrap a loaded tokenizer; default_eos_id is used when it names no end token."""
        backend = parts.backend
        vocab = backend.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ConfigError("the tokenizer has an empty vocabulary", ExitCode.MODEL)
        self._backend: Backend = backend
        self._table = TokenBytes(backend)
        self._skip_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._has_warned_of_two_bos = False
        self.special_tokens = dict(parts.special_tokens)
        self.chat_template = parts.chat_template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.max_token_id = max(vocab.values())
        self.max_chars_per_token = max(map(len, vocab))
        named = (vocab.get(text) for text in self.special_tokens.values())
        self.all_special_ids = self._skip_ids | {i for i in named if i is not None}
        self.bos_token_id = vocab.get(self.special_tokens.get("bos_token", ""))
        eos_id = vocab.get(self.special_tokens.get("eos_token", ""))
        self.eos_token_id = eos_id if eos_id is not None else default_eos_id

    def encode(self, text: str, *, add_special_tokens: bool, max_length: int | None = None) -> list[int]:
        """Tokenize; with max_length give at most that many ids (the first), without the cost of the rest.

        Lone surrogates count as U+FFFD. A text that already begins with the BOS token gets no second one.
        """
        text = _replace_surrogates(text)
        if max_length is not None:
            num_chars = (max_length + _PROBE_SLACK) * _PROBE_CHARS_PER_TOKEN
            while num_chars < len(text):
                probe = self._encode(text[:num_chars], add_special_tokens=add_special_tokens)
                if len(probe) > max_length + max_length // 8 + _PROBE_SLACK:
                    return probe[:max_length]
                num_chars *= _PROBE_GROWTH
        token_ids = self._encode(text, add_special_tokens=add_special_tokens)
        return token_ids if max_length is None else token_ids[:max_length]

    def encode_texts(
        self, texts: tuple[str, ...], *, add_special_tokens: bool, keep: int | None, side: str
    ) -> tuple[list[int], list[int]]:
        """Tokenize one text or two as one prompt; gives token ids and the number of the segment of each.

        keep is the most tokens of text that remain, special ones not counted; side left drops the beginning of a text.
        """
        clean = [_replace_surrogates(text) for text in texts]
        parts = self._backend.encode_batch_fast(clean, add_special_tokens=False)
        for part, length in zip(parts, kept_lengths([len(part.ids) for part in parts], keep), strict=True):
            part.truncate(length, direction="left" if side == "left" else "right")
        second = parts[1] if len(parts) == 2 else None
        whole = self._backend.post_process(parts[0], second, add_special_tokens)
        return whole.ids, whole.type_ids

    def num_added_tokens(self, *, is_pair: bool) -> int:
        """Give how many special tokens are added to one text or to two."""
        return self._backend.num_special_tokens_to_add(is_pair)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # The batch call releases the GIL and skips offsets; the single call does neither.
        token_ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        bos = self.bos_token_id
        has_two_bos = add_special_tokens and bos is not None and token_ids[:2] == [bos, bos]
        if has_two_bos and text.startswith(self.special_tokens["bos_token"]):
            if not self._has_warned_of_two_bos:
                self._has_warned_of_two_bos = True
                log.warning("a prompt began with the BOS token; the tokenizer's own was left out")
            return token_ids[1:]
        return token_ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
    ) -> str:
        """Give the text of a sequence; ids without a token have no text.

        spaces_between_special_tokens has no effect: the library puts no space between tokens of its own accord.
        """
        known = [i for i in token_ids if 0 <= i <= self.max_token_id]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_to_bytes(self, token_id: int) -> bytes:
        """Give the token's own bytes, also for a part of a character; empty for an id without a token."""
        return self._table[token_id]

    def id_to_token(self, token_id: int) -> str:
        """Give the token as the vocabulary spells it; empty for an id without a token."""
        if not 0 <= token_id <= self.max_token_id:
            return ""
        return self._backend.id_to_token(token_id) or ""

    def token_to_id(self, token: str) -> int | None:
        """Give the id of a token as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    def new_decode_stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, visible_token_ids: Sequence[int] = ()
    ) -> DecodeStream:
        """Start the incremental text of an output that follows a prompt; visible_token_ids are never skipped."""
        skip_ids = self._skip_ids.difference(visible_token_ids) if skip_special_tokens else frozenset[int]()
        if self._table.is_joinable:
            return ByteDecodeStream(self._table, prompt_token_ids, skip_ids)
        return WindowDecodeStream(self._backend, prompt_token_ids, skip_ids)


def _replace_surrogates(text: str) -> str:
    if _SURROGATE.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def kept_lengths(lengths: list[int], keep: int | None) -> list[int]:
    """Say how many tokens of each of one or two texts remain so that their sum is at most keep.

    The longer text loses tokens until both are of one length, then both do; an odd one stays with the longer text:
    the rule "longest first" of the tokenizers library.
    """
    if keep is None or sum(lengths) <= keep:
        return lengths
    if len(lengths) == 1:
        return [keep]
    first, second = lengths
    if keep >= 2 * min(first, second):
        return [keep - second, second] if first > second else [first, keep - first]
    half = keep // 2
    return [keep - half, half] if first > second else [half, keep - half]


def load_tokenizer(checkpoint: Checkpoint, override: str | None) -> Tokenizer:
    """Load the tokenizer of a checkpoint, or of the folder, tokenizer.json or GGUF file named by override.

    Raises ConfigError (exit code MODEL) when there is none or it is broken.
    """
    if override is not None:
        parts = _load_path(Path(override))
    elif checkpoint.format == "gguf":
        parts = _from_gguf(checkpoint.weight_files[0])
    else:
        parts = load_folder(Path(checkpoint.root))
    default_eos_id = checkpoint.eos_token_ids[0] if checkpoint.eos_token_ids else None
    return FastTokenizer(parts, default_eos_id)


def _from_gguf(path: str | Path) -> TokenizerParts:
    metadata = read_gguf_header(path).metadata
    try:
        return build_gguf_tokenizer(metadata)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.exit_code) from error


def _load_path(path: Path) -> TokenizerParts:
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path)
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise ConfigError(f"--tokenizer {path} is not a folder with tokenizer files", ExitCode.MODEL)
    return load_folder(folder)
