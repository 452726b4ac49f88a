"""Grammars over plain strings, for tests of what stands around them: an answer is one of a set of texts."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from serve.core.structured_output.grammar import MaskRow, allow_token
from serve.errors import InvalidRequest
from serve.sampling_params import StructuredOutputs
from serve.wire.frontend import SetVocabulary

WAIT_SECONDS = 30.0


class TextGrammar:
    """Allows the texts of a list; an end token where one is complete. Fails to fill after fail_after tokens."""

    def __init__(
        self, tokens: Sequence[bytes], texts: Sequence[bytes], end_token_ids: Sequence[int], fail_after: int = 10**9
    ) -> None:
        self.tokens = tokens
        self.texts = list(texts)
        self.end_token_ids = end_token_ids
        self.fail_after = fail_after
        self.accepted: list[bytes] = []

    @property
    def rests(self) -> list[bytes]:
        text = b"".join(self.accepted)
        return [option[len(text) :] for option in self.texts if option.startswith(text)]

    @property
    def is_finished(self) -> bool:
        return self.rests == [b""]

    def copy(self) -> TextGrammar:
        return TextGrammar(self.tokens, self.texts, self.end_token_ids, self.fail_after)

    def fill(self, row: MaskRow) -> None:
        if len(self.accepted) >= self.fail_after:
            raise InvalidRequest("too complex")
        row[:] = 0
        for token_id, token in enumerate(self.tokens):
            if token and any(rest.startswith(token) for rest in self.rests):
                allow_token(row, token_id)
        if b"" in self.rests:
            for token_id in self.end_token_ids:
                allow_token(row, token_id)

    def accept(self, token_id: int) -> bool:
        return self.accept_text(self.tokens[token_id])

    def accept_text(self, text: bytes) -> bool:
        if not text or not any(rest.startswith(text) for rest in self.rests):
            return False
        self.accepted.append(text)
        return True

    def count_valid(self, token_ids: Sequence[int]) -> int:
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        del self.accepted[len(self.accepted) - num_tokens :]


class TextBackend:
    """Compiles choice constraints; one whose texts begin with "slow" waits until it is released.

    A text "broken" makes it fail with a mistake of ours, "refused" with one of the client's, "fails" while it is used.
    """

    def __init__(self, vocabulary: SetVocabulary) -> None:
        self.vocabulary = vocabulary
        self.mask_words = (len(vocabulary.tokens) + 31) // 32
        self.end_token_ids = tuple(vocabulary.eos_token_ids)
        self.num_compiled = 0
        self.started = threading.Event()
        self.released = threading.Event()

    def compile(self, constraint: StructuredOutputs) -> TextGrammar:
        texts = [text.encode() for text in json.loads(constraint.spec)]
        self.num_compiled += 1
        if texts[0].startswith(b"slow"):
            self.started.set()
            assert self.released.wait(WAIT_SECONDS)
        if texts[0] == b"broken":
            raise RuntimeError("injected failure of the library")
        if texts[0] == b"refused":
            raise InvalidRequest("refused")
        fail_after = 1 if texts[0] == b"fails" else 10**9
        return TextGrammar(self.vocabulary.tokens, texts, self.end_token_ids, fail_after)


def choice(*texts: str) -> StructuredOutputs:
    return StructuredOutputs("choice", json.dumps(texts))


def allowed_ids(row: MaskRow) -> list[int]:
    """Give the ids whose bits are set."""
    return [index for index in range(32 * len(row)) if int(row[index >> 5]) >> (index & 31) & 1]
