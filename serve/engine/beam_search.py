"""Beam search over requests of one token: the likeliest continuations instead of drawn ones.

Each step asks the engine for the best next tokens of every beam and keeps the best beams; the prefix cache makes the
repeated prompts cheap. The score of a text is its summed logprob over its length (prompt included, end token not) to
the power of length_penalty, as vLLM scores.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Final

from serve.engine.async_llm import AsyncLLM
from serve.engine.input_processor import RequestOptions
from serve.engine.outputs import CompletionOutput, Logprob, RequestOutput
from serve.renderers.tokenizer import Tokenizer
from serve.sampling_params import OutputKind, SamplingParams
from serve.wire.frontend import FinishReason

# A beam is widened by twice as many tokens as there are beams, so that ended ones leave enough others.
CANDIDATES_PER_BEAM: Final = 2


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation; score is the summed logprob of its tokens."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    ended_by: int | None = None

    def extended(self, token_id: int, logprob: float, end_ids: frozenset[int]) -> Beam:
        """Give the beam with one more token."""
        return Beam((*self.token_ids, token_id), self.score + logprob, token_id if token_id in end_ids else None)

    def ranked_by(self, num_prompt_tokens: int, length_penalty: float) -> float:
        """Give the score that beams of different lengths are compared by; higher is better."""
        length = num_prompt_tokens + len(self.token_ids) - (self.ended_by is not None)
        return self.score / math.pow(length, length_penalty)


class BeamStream:
    """The one hand-over of a beam search with n = width choices, best first.

    Of the sampling parameters it uses n, max_tokens, the end ids and what concerns the text.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        options: RequestOptions,
        length_penalty: float,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompt = prompt_token_ids
        self._params = params
        self._request_id = request_id
        self._options = options
        self._length_penalty = length_penalty
        self._is_over = False

    def __aiter__(self) -> BeamStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        self._is_over = True
        beams = await self._search()
        outputs = [self._output(index, beam) for index, beam in enumerate(beams)]
        return RequestOutput(self._request_id, self._prompt, outputs, finished=True)

    async def aclose(self) -> None:
        """Do nothing: the search runs inside the read, and ends with it."""

    async def _search(self) -> list[Beam]:
        params = self._params
        end_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_ids |= self._engine.end_token_ids
        room = self._engine.max_model_len - len(self._prompt)
        beams, ended = [Beam()], list[Beam]()
        for _ in range(min(params.max_tokens, room)):
            widened = await asyncio.gather(*(self._widen(beam, end_ids) for beam in beams))
            candidates = [beam for group in widened for beam in group]
            ended += [beam for beam in candidates if beam.ended_by is not None]
            going_on = [beam for beam in candidates if beam.ended_by is None]
            beams = self._best(going_on)
            if not beams:
                break
        return self._best(ended + beams)

    def _best(self, beams: list[Beam]) -> list[Beam]:
        num_prompt = len(self._prompt)
        ordered = sorted(beams, key=lambda beam: beam.ranked_by(num_prompt, self._length_penalty), reverse=True)
        return ordered[: self._params.n]

    async def _widen(self, beam: Beam, end_ids: frozenset[int]) -> list[Beam]:
        """Give the likeliest continuations of a beam by one token."""
        count = CANDIDATES_PER_BEAM * self._params.n
        step = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=count, detokenize=False, output_kind=OutputKind.FINAL_ONLY
        )
        stream = await self._engine.add_request(
            [*self._prompt, *beam.token_ids], step, self._request_id, options=self._options
        )
        try:
            output = await anext(stream)
        finally:
            await stream.aclose()
        positions = output.outputs[0].logprobs
        assert positions, "a token comes with the logprobs that were asked for"
        best: list[tuple[int, Logprob]] = [item for item in positions[0].items() if item[1].rank <= count]
        return [beam.extended(token_id, candidate.logprob, end_ids) for token_id, candidate in best]

    def _output(self, index: int, beam: Beam) -> CompletionOutput:
        params = self._params
        shown = beam.token_ids if beam.ended_by is None else beam.token_ids[:-1]
        text = self._tokenizer.decode(
            shown,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        reason = FinishReason.LENGTH if beam.ended_by is None else FinishReason.STOP
        stop_reason = beam.ended_by if beam.ended_by in params.stop_token_ids else None
        return CompletionOutput(index, text, list(beam.token_ids), None, reason, stop_reason)
