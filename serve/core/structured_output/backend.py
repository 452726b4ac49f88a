"""Grammars by the llguidance library: the vocabulary as a trie, constraints compiled to matchers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from serve.core.structured_output.grammar import MaskRow
from serve.core.structured_output.lark import to_lark
from serve.errors import InvalidRequest
from serve.sampling_params import StructuredOutputs
from serve.wire.frontend import SetVocabulary

_MAX_LEXER_STATES: Final = 50_000  # about 2 kB each
_MAX_ITEMS_IN_ROW: Final = 25_000  # an object with n optional properties takes 4 n
_MISFIT: Final = "doesn't satisfy the grammar"
_TOO_COMPLEX: Final = "the constraint cannot be followed further: "
_QUIET: Final = 0
# Where the library says a mistake stands; its first line is ours.
_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_IN_SCHEMA: Final = "failed to compile JSON schema: "
_IN_REGEX: Final = re.compile(r'invalid regex ".*?" \(in regex\): ', re.DOTALL)
_UNKNOWN_KEYS: Final = re.compile(r"Unimplemented keys: \[(.*)\]")
_MAX_MESSAGE: Final = 400


class _Vocabulary:
    """The vocabulary in the shape the library asks for."""

    def __init__(self, message: SetVocabulary) -> None:
        special = set(message.special_token_ids) | set(message.eos_token_ids)
        self.tokens = message.tokens
        self.special_token_ids = sorted(special)
        # None adds an id that no model samples: without end tokens an answer ends only when nothing can follow.
        self.eos_token_id = message.eos_token_ids[0] if message.eos_token_ids else None
        self.bos_token_id = None
        self._ids: dict[bytes, int] = {}
        for token_id, token in enumerate(message.tokens):
            if token and token_id not in special:
                self._ids.setdefault(token, token_id)
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Cut a text into the longest tokens that fit; bytes without a token are left out."""
        token_ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                start += 1
                continue
            token_ids.append(self._ids[text[start:end]])
            start = end
        return token_ids


class LLGuidanceBackend:
    """Compiles constraints for one vocabulary. compile may be called from several threads at once.

    mask_words is the length of a mask row. end_token_ids are the ids below 32 * mask_words that end an answer.
    """

    def __init__(self, message: SetVocabulary) -> None:
        self._vocabulary = _Vocabulary(message)
        ends = list(message.eos_token_ids)
        self._tokenizer = LLTokenizer(TokenizerWrapper(self._vocabulary), eos_token=ends or None)
        self._limits = LLParserLimits(
            max_items_in_row=_MAX_ITEMS_IN_ROW,
            step_max_items=_MAX_ITEMS_IN_ROW,
            max_lexer_states=_MAX_LEXER_STATES,
            precompute_large_lexemes=False,
            verbose_errors=False,
        )
        self.mask_words = (self._tokenizer.vocab_size + 31) // 32
        self.end_token_ids = tuple(ends) or (self._tokenizer.eos_token,)

    def compile(self, constraint: StructuredOutputs) -> LLGuidanceGrammar:
        """Give the grammar of a constraint, before its first token. Raises InvalidRequest saying what is wrong."""
        matcher = LLMatcher(self._tokenizer, to_lark(constraint), log_level=_QUIET, limits=self._limits)
        grammar = LLGuidanceGrammar(matcher, self._vocabulary)
        if matcher.is_error():
            raise InvalidRequest(f"{constraint.kind} cannot be used as a constraint: {_clean(matcher.get_error())}")
        # An explosive expression shows in its first mask; a copy keeps the original before its first token.
        scratch = matcher.deep_copy()
        scratch.compute_bitmask()
        if scratch.is_error():
            raise InvalidRequest(f"{constraint.kind} cannot be used as a constraint: {_clean(scratch.get_error())}")
        return grammar


class LLGuidanceGrammar:
    """Where one answer stands in its grammar. Belongs to one thread at a time."""

    __slots__ = ("_matcher", "_vocabulary")

    def __init__(self, matcher: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def is_finished(self) -> bool:
        """True when the text is complete and nothing can follow it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def copy(self) -> LLGuidanceGrammar:
        """Give an independent grammar in the same place."""
        return LLGuidanceGrammar(self._matcher.deep_copy(), self._vocabulary)

    def fill(self, row: MaskRow) -> None:
        """Write the tokens that may come next; end tokens among them when the text may end here.

        Raises InvalidRequest when there is none, or when the grammar turned out to be too complex.
        """
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise InvalidRequest(_TOO_COMPLEX + _clean(self._matcher.get_error()))

    def accept(self, token_id: int) -> bool:
        """Move over a token; False when the grammar does not allow it: then it must not be used any more.

        Raises InvalidRequest when the grammar turned out to be too complex.
        """
        if self._matcher.consume_token(token_id):
            return True
        error = self._matcher.get_error()
        if _MISFIT in error or self._matcher.stop_reason() == "NoExtension":
            return False
        raise InvalidRequest(_TOO_COMPLEX + _clean(error))

    def accept_text(self, text: bytes) -> bool:
        """Move over the rest of a token; False, and no move, when the grammar does not allow it."""
        token_ids = self._vocabulary(text)
        is_whole = sum(len(self._vocabulary.tokens[token_id]) for token_id in token_ids) == len(text)
        if not is_whole or self.count_valid(token_ids) < len(token_ids):
            return False
        return bool(self._matcher.consume_tokens(token_ids))

    def count_valid(self, token_ids: Sequence[int]) -> int:
        """Give how many of the tokens may follow one after the other; no move."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def rollback(self, num_tokens: int) -> None:
        """Take back the tokens accepted last."""
        is_done = self._matcher.rollback(num_tokens)
        assert is_done, f"{num_tokens} tokens were not accepted before"


def _clean(text: str) -> str:
    """Give the library's message without its own names, its copy of the grammar and our first line."""
    lines = text.splitlines()
    first = lines[0] if lines else "the grammar library gives no reason"
    if first.startswith("NoExtension"):
        return "no token of this model continues the text"
    place = _PLACE.match(first)
    where = ""
    if place is not None:
        first = first[place.end() :]
        # In the other kinds the user wrote no lines of a grammar.
        is_wrapped = first.startswith(_IN_SCHEMA) or _IN_REGEX.match(first) is not None
        where = "" if is_wrapped else f"line {max(int(place.group(1)) - 1, 1)}, column {place.group(2)}: "
    # The regular expression parser explains itself on later lines.
    reason = next((line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")), None)
    message = _IN_REGEX.sub("", first.removeprefix(_IN_SCHEMA)) + (f" {reason}" if reason is not None else "")
    unknown = _UNKNOWN_KEYS.match(message)
    if unknown is not None:
        message = f"the schema words {unknown.group(1)} are not supported"
    if message.startswith("oneOf constraints"):
        message = "oneOf with alternatives that may overlap is not supported; use anyOf"
    return (where + message)[:_MAX_MESSAGE]
