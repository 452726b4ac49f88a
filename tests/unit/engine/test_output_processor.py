"""Hand-overs: merging for slow readers, logprobs that ride with their ids, kinds of output, statistics."""

from __future__ import annotations

import asyncio
import time

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from serve.engine.logprobs import LogprobsProcessor, TokenTexts
from serve.engine.output_processor import ClientRequest, OutputProcessor, RequestOutputCollector
from serve.engine.outputs import CompletionOutput, RequestOutput
from serve.engine.parallel_sampling import ParentRequest, child_params, num_children
from serve.engine.stats import EngineStats
from serve.errors import EngineDead, RequestFailed
from serve.sampling_params import OutputKind, SamplingParams
from serve.wire.frontend import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EventType,
    FinishReason,
    LogprobsLists,
)
from tests.fakes import ByteTokenizer

KINDS = [OutputKind.DELTA, OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY]


class Harness:
    """An output processor with one client request."""

    def __init__(self, params: SamplingParams, *, stream_interval: int = 1) -> None:
        self.stats = EngineStats(128)
        self.processor = OutputProcessor(ByteTokenizer(), stats=self.stats, stream_interval=stream_interval)
        self.collector = RequestOutputCollector(params.output_kind)
        client = ClientRequest("ext", self.collector, ParentRequest(params) if params.n > 1 else None)
        for index in range(num_children(params)):
            child = child_params(params, index) if params.n > 1 else params
            request = EngineCoreRequest(f"r{index}", [1, 2, 3], child, 0.0)
            self.processor.add_request(request, client, index=index, arrival=time.monotonic())

    def step(self, *outputs: EngineCoreOutput, at: float = 1.0) -> list[str]:
        return self.processor.process_outputs(outputs, at)


def params(kind: OutputKind, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=64, output_kind=kind, **changes)  # type: ignore[arg-type]


def table(*rows: list[tuple[int, float]], rank: int = 1) -> LogprobsLists:
    return LogprobsLists(
        np.array([[i for i, _ in row] for row in rows], np.int32),
        np.array([[value for _, value in row] for row in rows], np.float32),
        np.full(len(rows), rank, np.int32),
    )


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(min_size=1, max_size=20),
    reads=st.lists(st.booleans(), min_size=60, max_size=60),
    kind=st.sampled_from(KINDS),
    interval=st.integers(1, 4),
)
def test_text_and_ids_do_not_depend_on_when_the_reader_reads(
    text: str, reads: list[bool], kind: OutputKind, interval: int
) -> None:
    data = text.encode()
    harness = Harness(params(kind), stream_interval=interval)
    seen: list[RequestOutput] = []
    for position, byte in enumerate(data):
        reason = FinishReason.LENGTH if position == len(data) - 1 else None
        harness.step(EngineCoreOutput("r0", [byte], finish_reason=reason))
        if reads[position % len(reads)] and (output := harness.collector.get_nowait()):
            seen.append(output)
    if output := harness.collector.get_nowait():
        seen.append(output)
    choices = [o.outputs[0] for o in seen]
    if kind == OutputKind.DELTA:
        assert "".join(c.text for c in choices) == text
        assert [i for c in choices for i in c.token_ids] == list(data)
    else:
        assert choices[-1].text == text
        assert choices[-1].token_ids == list(data)
    if kind == OutputKind.FINAL_ONLY:
        assert len(seen) == 1
    assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].num_generated_tokens == {0: len(data)}


def test_logprobs_ride_with_the_ids_they_belong_to() -> None:
    harness = Harness(params(OutputKind.DELTA, logprobs=1, stop=("xyz",)), stream_interval=2)
    lengths = []
    for position, byte in enumerate(b"abxyq"):
        reason = FinishReason.LENGTH if position == 4 else None
        harness.step(EngineCoreOutput("r0", [byte], table([(byte, -0.5), (5, -0.25)], rank=2), finish_reason=reason))
        if (output := harness.collector.get_nowait()) is not None:
            (choice,) = output.outputs
            assert choice.logprobs is not None
            assert [next(iter(p)) for p in choice.logprobs] == choice.token_ids
            lengths.append((len(choice.token_ids), choice.text))
    assert lengths == [(1, "a"), (2, "b"), (2, "xyq")]


def test_positions_start_with_the_sampled_token_then_best_first() -> None:
    processor = LogprobsProcessor(TokenTexts(ByteTokenizer()))
    processor.update(table([(97, -3.0), (98, -0.5), (99, -1.0)], rank=9))
    processor.update(table([(98, -0.5), (98, -0.5), (99, -1.0)], rank=1))
    outside, inside = processor.take(is_delta=True)
    assert [(i, p.rank, p.decoded) for i, p in outside.items()] == [(97, 9, "a"), (98, 1, "b"), (99, 2, "c")]
    assert [(i, p.rank) for i, p in inside.items()] == [(98, 1), (99, 2)]
    assert processor.take(is_delta=True) == []


def test_a_tie_at_the_edge_of_the_list_keeps_k_candidates_of_rank_k_or_less() -> None:
    processor = LogprobsProcessor(TokenTexts(ByteTokenizer()))
    processor.update(table([(98, -1.0), (97, -1.0), (98, -1.0)], rank=3))
    (position,) = processor.take(is_delta=True)
    assert sorted(p.rank for p in position.values()) == [1, 2]


def test_a_token_that_is_part_of_a_character_has_its_own_bytes() -> None:
    texts = TokenTexts(ByteTokenizer([b" word", b"\xf0\x9f"]))
    assert texts.get(0xF0) == ("\ufffd", b"\xf0")
    assert texts.get(260) == (" word", b" word")
    assert texts.get(261) == ("\ufffd", b"\xf0\x9f")


def test_prompt_logprobs_are_given_once_and_start_with_none() -> None:
    harness = Harness(params(OutputKind.DELTA, prompt_logprobs=0))
    harness.step(EngineCoreOutput("r0", [97], new_prompt_logprobs=table([(2, -1.0)], [(3, -2.0)])))
    first = harness.collector.get_nowait()
    harness.step(EngineCoreOutput("r0", [98]))
    second = harness.collector.get_nowait()
    assert first is not None
    assert second is not None
    assert first.prompt_logprobs is not None
    assert [p and list(p) for p in first.prompt_logprobs] == [None, [2], [3]]
    assert first.outputs[0].logprobs is None
    assert second.prompt_logprobs is None


def test_prompt_logprobs_of_n_choices_come_with_the_final_output() -> None:
    harness = Harness(params(OutputKind.FINAL_ONLY, n=2, prompt_logprobs=0))
    finish = FinishReason.LENGTH
    harness.step(EngineCoreOutput("r0", [97], new_prompt_logprobs=table([(2, -1.0)]), finish_reason=finish))
    assert harness.collector.get_nowait() is None
    harness.step(EngineCoreOutput("r1", [98], finish_reason=finish))
    output = harness.collector.get_nowait()
    assert output is not None
    assert output.prompt_logprobs is not None
    assert [c.text for c in output.outputs] == ["a", "b"]


def test_choices_of_a_stream_merge_by_index() -> None:
    harness = Harness(params(OutputKind.DELTA, n=2, logprobs=0))
    for text in ("ab", "cd"):
        harness.step(*(EngineCoreOutput(f"r{i}", [ord(c)], table([(ord(c), -1.0)])) for i, c in enumerate(text)))
    output = harness.collector.get_nowait()
    assert output is not None
    assert {c.index: c.text for c in output.outputs} == {0: "ac", 1: "bd"}
    assert [len(c.logprobs or ()) for c in output.outputs] == [2, 2]
    assert not output.finished


def test_a_finished_choice_is_not_given_again() -> None:
    harness = Harness(params(OutputKind.CUMULATIVE, n=2))
    harness.step(EngineCoreOutput("r0", [97], finish_reason=FinishReason.STOP))
    assert harness.collector.get_nowait() is not None
    harness.step(EngineCoreOutput("r1", [98]))
    output = harness.collector.get_nowait()
    assert output is not None
    assert [c.index for c in output.outputs] == [1]


def test_an_error_replaces_what_is_pending_and_stays() -> None:
    async def body() -> None:
        collector = RequestOutputCollector(OutputKind.DELTA)
        collector.put(RequestOutput("a", [], [CompletionOutput(0, "x", [1])], False))
        collector.fail(RequestFailed("first", cause="x"))
        collector.fail(EngineDead())
        collector.put(RequestOutput("a", [], [], True))
        for _ in range(2):
            with pytest.raises(RequestFailed, match="first"):
                await collector.get()

    asyncio.run(body())


def test_stop_beats_length_on_the_same_token_and_needs_no_abort() -> None:
    harness = Harness(params(OutputKind.FINAL_ONLY, stop=("b",)))
    harness.step(EngineCoreOutput("r0", [97]))
    aborts = harness.step(EngineCoreOutput("r0", [98], finish_reason=FinishReason.LENGTH))
    output = harness.collector.get_nowait()
    assert output is not None
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (FinishReason.STOP, "b")
    assert output.outputs[0].text == "a"
    assert output.outputs[0].token_ids == [97, 98]
    assert aborts == []


def test_a_secondary_end_id_is_the_stop_reason() -> None:
    harness = Harness(params(OutputKind.FINAL_ONLY))
    harness.step(EngineCoreOutput("r0", [97, 258], finish_reason=FinishReason.STOP, stop_reason=258))
    output = harness.collector.get_nowait()
    assert output is not None
    assert output.outputs[0].stop_reason == 258
    assert output.outputs[0].text == "a"


def test_finished_requests_leave_no_state() -> None:
    harness = Harness(params(OutputKind.DELTA, n=3))
    assert harness.processor.num_without_output == 3
    assert sorted(harness.processor.internal_ids("ext")) == ["r0", "r1", "r2"]
    harness.step(EngineCoreOutput("r0", [97]))
    assert harness.processor.num_without_output == 2
    harness.step(EngineCoreOutput("r0", [97], finish_reason=FinishReason.LENGTH))
    assert harness.processor.abort(["r1", "unknown", "r1"]) == ["r1"]
    harness.step(EngineCoreOutput("r2", [], finish_reason=FinishReason.ERROR, error="model_error: x"))
    assert harness.processor.num_unfinished == 0
    assert harness.processor.num_without_output == 0
    assert harness.processor.prompt_tokens_without_output == 0
    assert harness.processor.internal_ids("ext") == []
    assert harness.processor.idle.is_set()
    counts = harness.stats.counters.request_success
    assert counts == {"stop": 0, "length": 1, "abort": 1, "error": 1, "repetition": 0}
    assert harness.stats.histograms["request_params_n"].count == 1
    assert harness.stats.histograms["request_max_num_generation_tokens"].sum == 2


def test_seeds_of_children_wrap_at_64_bits() -> None:
    top = SamplingParams(n=3, seed=2**63 - 1)
    assert [child_params(top, i).seed for i in range(3)] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert child_params(SamplingParams(n=2), 1).seed is None
    assert child_params(msgspec.structs.replace(top, prompt_logprobs=2), 1).prompt_logprobs is None


def test_durations_follow_the_engines_clock() -> None:
    harness = Harness(params(OutputKind.DELTA))
    events = [EngineCoreEvent(EventType.QUEUED, 10.0), EngineCoreEvent(EventType.SCHEDULED, 12.0)]
    again = [EngineCoreEvent(EventType.PREEMPTED, 14.2), EngineCoreEvent(EventType.SCHEDULED, 14.4)]
    harness.step(EngineCoreOutput("r0", [97], events=events), at=13.0)
    harness.step(EngineCoreOutput("r0", [98]), at=14.0)
    harness.step(EngineCoreOutput("r0", [99], events=again, finish_reason=FinishReason.LENGTH), at=15.0)
    sums = {name: h.sum for name, h in harness.stats.histograms.items()}
    assert sums["request_queue_time_seconds"] == 2.0
    assert sums["request_prefill_time_seconds"] == 1.0
    assert sums["request_decode_time_seconds"] == 2.0
    assert sums["request_inference_time_seconds"] == 3.0
    assert sums["request_time_per_output_token_seconds"] == 1.0
    assert sums["inter_token_latency_seconds"] == 2.0
    assert harness.stats.counters.generation_tokens == 3
