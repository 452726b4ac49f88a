"""Beam search over a table of next-token logprobs: the best beams by hand, their scores, ends and text."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from serve.engine.beam_search import BeamStream
from serve.engine.input_processor import RequestOptions
from serve.engine.outputs import CompletionOutput, Logprob, RequestOutput
from serve.sampling_params import SamplingParams
from serve.wire.frontend import FinishReason
from tests.fakes import EOS_ID, ByteTokenizer, ScriptedStream

LETTERS = [97, 98, 99, 100, 101, EOS_ID]
PROMPT = [120, 121]


class TableEngine:
    """Answers each one-token request with the best entries of a table, by the last token."""

    def __init__(self, seed: int, *, max_model_len: int = 64) -> None:
        rng = np.random.default_rng(seed)
        self.max_model_len = max_model_len
        self.end_token_ids = frozenset({EOS_ID})
        logits = rng.standard_normal((len(LETTERS) + 1, len(LETTERS))) * 2
        self.logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        self.closed: list[str] = []
        self.num_requests = 0

    def row(self, token_ids: Sequence[int]) -> np.ndarray:
        last = token_ids[-1]
        return self.logprobs[LETTERS.index(last) if last in LETTERS else len(LETTERS)]

    async def add_request(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, request_id: str, *, options: RequestOptions
    ) -> ScriptedStream:
        assert (sampling_params.max_tokens, sampling_params.n) == (1, 1)
        self.num_requests += 1
        row = self.row(prompt_token_ids)
        order = np.argsort(-row)[: sampling_params.logprobs]
        position = {LETTERS[i]: Logprob(float(row[i]), rank, "", b"") for rank, i in enumerate(order, 1)}
        output = CompletionOutput(0, "", [LETTERS[order[0]]], [position], FinishReason.LENGTH)
        return ScriptedStream(self, request_id, [RequestOutput("id", [], [output], finished=True)])  # type: ignore[arg-type]


def search(engine: TableEngine, *, length_penalty: float = 1.0, **params: object) -> list[CompletionOutput]:
    async def work() -> list[RequestOutput]:
        stream = BeamStream(
            engine,  # type: ignore[arg-type]
            ByteTokenizer(),
            PROMPT,
            SamplingParams(**params),  # type: ignore[arg-type]
            request_id="r",
            options=RequestOptions(),
            length_penalty=length_penalty,
        )
        hand_overs = [output async for output in stream]
        await stream.aclose()
        return hand_overs

    (hand_over,) = asyncio.run(work())
    assert hand_over.finished
    return hand_over.outputs


def score(engine: TableEngine, tokens: Sequence[int]) -> float:
    known = list(PROMPT)
    total = 0.0
    for token in tokens:
        total += float(engine.row(known)[LETTERS.index(token)])
        known.append(token)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_as_many_beams_as_there_are_texts_find_the_best_of_all(seed: int) -> None:
    engine = TableEngine(seed)
    found = search(engine, n=36, max_tokens=2, ignore_eos=True)
    every = sorted(itertools.product(LETTERS, repeat=2), key=lambda tokens: -score(engine, tokens))
    assert [output.token_ids for output in found] == [list(tokens) for tokens in every]
    assert [output.index for output in found] == list(range(36))
    assert {output.finish_reason for output in found} == {FinishReason.LENGTH}


def test_one_beam_is_the_greedy_text() -> None:
    engine = TableEngine(7)
    (found,) = search(engine, n=1, max_tokens=4, ignore_eos=True)
    known = list(PROMPT)
    for _ in range(4):
        known.append(LETTERS[int(engine.row(known).argmax())])
    assert found.token_ids == known[len(PROMPT) :]
    assert found.text == bytes(token for token in found.token_ids if token < 256).decode()


@pytest.mark.parametrize("length_penalty", [-2.0, 0.0, 1.0, 4.0])
def test_texts_that_end_compete_with_longer_ones_by_length(length_penalty: float) -> None:
    engine = TableEngine(3)
    found = search(engine, n=60, max_tokens=3, length_penalty=length_penalty)
    letters = [letter for letter in LETTERS if letter != EOS_ID]
    ended = [(*front, EOS_ID) for size in (0, 1, 2) for front in itertools.product(letters, repeat=size)]
    whole = list(itertools.product(letters, repeat=3))

    def rank(tokens: Sequence[int]) -> float:
        length = len(PROMPT) + len(tokens) - (tokens[-1] == EOS_ID)
        return -score(engine, tokens) / length**length_penalty

    best = sorted([*ended, *whole], key=rank)[:60]
    np.testing.assert_allclose([rank(o.token_ids) for o in found], [rank(tokens) for tokens in best], rtol=1e-9)
    for output in found:
        is_ended = output.token_ids[-1] == EOS_ID
        assert output.finish_reason is (FinishReason.STOP if is_ended else FinishReason.LENGTH)
        assert output.text == bytes(output.token_ids[: -1 if is_ended else None]).decode()


def test_a_stop_id_of_the_request_ends_a_beam_and_is_named() -> None:
    found = search(TableEngine(1), n=36, max_tokens=2, ignore_eos=True, stop_token_ids=(98,))
    ended = [output for output in found if output.finish_reason is FinishReason.STOP]
    assert ended
    assert all(output.token_ids[-1] == output.stop_reason == 98 for output in ended)


def test_the_context_bounds_the_length() -> None:
    found = search(TableEngine(1, max_model_len=len(PROMPT) + 2), n=2, max_tokens=50, ignore_eos=True)
    assert [len(output.token_ids) for output in found] == [2, 2]
