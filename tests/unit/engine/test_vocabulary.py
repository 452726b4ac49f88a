"""The vocabulary reaches the engine once, before the first request that needs it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serve.engine.vocabulary import VocabularySender, build_vocabulary
from serve.errors import RequestFailed
from serve.sampling_params import ReasoningBounds, SamplingParams, StructuredOutputs
from serve.wire.frontend import ControlResult, EngineCoreOutputs, SetVocabulary
from tests.fakes import BOS_ID, EOS_ID, SECOND_EOS_ID, ByteTokenizer
from tests.unit.engine.test_async_llm import DELTA, PROMPT, Bench, run
from tests.waiting import async_wait_until

CONSTRAINED = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs("regex", "a+"))
THINKING = SamplingParams(max_tokens=8, reasoning=ReasoningBounds("</t>", (5,)))


def test_every_id_has_its_bytes_and_special_ids_are_marked() -> None:
    message = build_vocabulary(ByteTokenizer([b"word"]), [SECOND_EOS_ID, EOS_ID])
    assert message.tokens[97] == b"a"
    assert message.tokens[-1] == b"word"
    assert message.special_token_ids == [EOS_ID, BOS_ID, SECOND_EOS_ID]
    assert message.eos_token_ids == [EOS_ID, SECOND_EOS_ID]


@pytest.mark.parametrize("params", [CONSTRAINED, THINKING], ids=["constraint", "reasoning"])
def test_concurrent_first_requests_wait_for_one_message(tmp_path: Path, params: SamplingParams) -> None:
    async def test(b: Bench) -> None:
        adding = [asyncio.create_task(b.llm.add_request(PROMPT, params, str(i))) for i in range(3)]
        await b.llm.add_request(PROMPT, DELTA, "free")
        await async_wait_until(lambda: len(b.core.controls) == 1, 5, "the vocabulary")
        # The free one has not waited; the others are sent after the answer only.
        assert [r.external_req_id for r in await b.core.wait_requests(1)] == ["free"]
        call = b.core.controls[0]
        assert isinstance(call.control, SetVocabulary)
        b.core.send_message(EngineCoreOutputs(outputs=[], control_result=ControlResult(call.call_id, True)))
        await asyncio.gather(*adding)
        await b.llm.add_request(PROMPT, params, "later")
        assert len(await b.core.wait_requests(5)) == 5
        assert len(b.core.controls) == 1

    run(tmp_path, test)


def test_a_message_that_failed_is_sent_again() -> None:
    answers: list[bool] = []

    class Core:
        async def control(self, control: SetVocabulary) -> bool:
            answers.append(bool(answers))
            if len(answers) == 1:
                raise RequestFailed("refused", cause="control_failed")
            return True

    async def test() -> None:
        sender = VocabularySender(Core(), ByteTokenizer(), [EOS_ID])  # type: ignore[arg-type]
        with pytest.raises(RequestFailed):
            await sender.ensure(CONSTRAINED)
        await sender.ensure(CONSTRAINED)
        await sender.ensure(CONSTRAINED)
        await sender.ensure(DELTA)

    asyncio.run(test())
    assert answers == [False, True]
