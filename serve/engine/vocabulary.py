"""The vocabulary for the engine core: grammars work on text, and only the front end has a tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from serve.engine.core_client import CoreClient
from serve.renderers.tokenizer import Tokenizer
from serve.sampling_params import SamplingParams
from serve.wire.frontend import SetVocabulary


def build_vocabulary(tokenizer: Tokenizer, end_token_ids: Iterable[int]) -> SetVocabulary:
    """Give the bytes of every token; ids without a token have none."""
    return SetVocabulary(
        tokens=[tokenizer.token_to_bytes(token_id) for token_id in range(tokenizer.max_token_id + 1)],
        special_token_ids=sorted(tokenizer.all_special_ids),
        eos_token_ids=sorted(end_token_ids),
    )


class VocabularySender:
    """Tells the engine core the vocabulary once, before the first request that needs it. Belongs to one event loop."""

    def __init__(self, core: CoreClient, tokenizer: Tokenizer, end_token_ids: Iterable[int]) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._end_token_ids = frozenset(end_token_ids)
        self._lock = asyncio.Lock()
        self._is_sent = False

    async def ensure(self, params: SamplingParams) -> None:
        """Return when the engine core knows what a request with these parameters needs.

        Raises RequestFailed, Overloaded or EngineDead; the next call tries again.
        """
        if self._is_sent or (params.structured_outputs is None and params.reasoning is None):
            return
        async with self._lock:
            if not self._is_sent:
                message = await asyncio.to_thread(build_vocabulary, self._tokenizer, self._end_token_ids)
                await self._core.control(message)
                self._is_sent = True
