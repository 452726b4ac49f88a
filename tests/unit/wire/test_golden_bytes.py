"""The protocol is the order of fields: each message against the plain arrays that it must be on the wire."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from serve.pooling_params import PoolingParams
from serve.sampling_params import (
    OutputKind,
    ReasoningBounds,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
)
from serve.wire.codec import MsgpackEncoder
from serve.wire.frontend import (
    ENGINE_CORE_DEAD,
    CheckIntegrity,
    ControlCall,
    ControlResult,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EventType,
    FinishReason,
    Hello,
    IsPaused,
    LoadProgress,
    LogprobsLists,
    PauseScheduler,
    PrefillStats,
    Ready,
    RequestType,
    ResetPrefixCache,
    ResumeScheduler,
    SchedulerStats,
    SetVocabulary,
    StartFailed,
)
from serve.wire.step import (
    CachedRequestData,
    GrammarOutput,
    KVCacheConfig,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)

INLINE = msgspec.msgpack.Ext(3, b"\x01\0\0\0")
TABLE = LogprobsLists(np.ones((1, 1), np.int32), np.ones((1, 1), np.int32).view(np.float32), np.ones(1, np.int32))
PLAIN_TABLE = [["<i4", [1, 1], INLINE], ["<f4", [1, 1], INLINE], ["<i4", [1], INLINE]]
PARAMS = SamplingParams(
    n=2,
    temperature=0.5,
    top_p=0.9,
    top_k=4,
    min_p=0.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    repetition_penalty=1.5,
    seed=7,
    max_tokens=8,
    min_tokens=3,
    stop=("s",),
    stop_token_ids=(5,),
    include_stop_str_in_output=True,
    ignore_eos=True,
    logprobs=1,
    prompt_logprobs=2,
    logit_bias={3: -1.0},
    allowed_token_ids=(1, 2),
    bad_words=("w",),
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    output_kind=OutputKind.DELTA,
    detokenize=False,
    skip_reading_prefix_cache=True,
    eos_token_id=9,
    all_stop_token_ids=(5, 9),
    bad_words_token_ids=((6, 7),),
    extra_args={"x": 1},
    structured_outputs=StructuredOutputs("regex", "a+", "[ ]", True, True),
    reasoning=ReasoningBounds("</t>", (3, 4), 2, 10),
    visible_token_ids=(8,),
    logprob_token_ids=(1, 3),
    repetition_detection=RepetitionDetection(1, 4, 3),
)
PLAIN_PARAMS = [
    *(2, 0.5, 0.9, 4, 0.1, 0.2, 0.3, 1.5, 7, 8, 3, ["s"], [5], True, True, 1, 2, {3: -1.0}, [1, 2], ["w"]),
    *(False, False, 1, False, True, 9, [5, 9], [[6, 7]], {"x": 1}),
    *(["regex", "a+", "[ ]", True, True], ["</t>", [3, 4], 2, 10], [8], [1, 3], [1, 4, 3]),
]
PLAIN_DEFAULT_PARAMS = [
    *(1, 1.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0, None, 16, 0, [], [], False, False, None, None, None, None, []),
    *(True, True, 0, True, False, None, [], [], None, None, None, [], None, None),
]
PLAIN_POOLING = ["embed", 4, True, 3]
PLAIN_TOKEN = ["a", [4], None, None, None, None, None, None, None, None]
READY = Ready(128, 65, 16, "float32", "cpu", 1024, 8.0, 0.5)

CASES = {
    "params": (PARAMS, PLAIN_PARAMS),
    "request": (
        EngineCoreRequest(
            "a", [1, 2], PARAMS, 1.5, "salt", 1, -3, "ext", PoolingParams("embed", 4, True, 3), np.ones(1, np.int32)
        ),
        ["a", [1, 2], PLAIN_PARAMS, 1.5, "salt", 1, -3, "ext", PLAIN_POOLING, ["<i4", [1], INLINE]],
    ),
    "request-defaults": (
        EngineCoreRequest("a", [1], SamplingParams(), 1.5),
        ["a", [1], PLAIN_DEFAULT_PARAMS, 1.5, None, 0, 0, None, None, None],
    ),
    "table": (TABLE, PLAIN_TABLE),
    "output": (
        EngineCoreOutput(
            "a",
            [4],
            TABLE,
            TABLE,
            FinishReason.STOP,
            9,
            [EngineCoreEvent(EventType.QUEUED, 2.5)],
            PrefillStats(16, 8),
            "nan_logits: x",
            np.ones(1, np.int32),
        ),
        ["a", [4], PLAIN_TABLE, PLAIN_TABLE, 0, 9, [[1, 2.5]], [16, 8], "nan_logits: x", ["<i4", [1], INLINE]],
    ),
    "output-token": (EngineCoreOutput("a", [4]), PLAIN_TOKEN),
    "outputs": (
        EngineCoreOutputs(
            3, [EngineCoreOutput("a", [4])], SchedulerStats(1, 2, 3, 0.5, 4, 5, 6, 7, 8), 2.5, ControlResult(1, True)
        ),
        [3, [PLAIN_TOKEN], [1, 2, 3, 0.5, 4, 5, 6, 7, 8], 2.5, [1, True, None]],
    ),
    "control-result-failed": (ControlResult(1, failure_message="x"), [1, None, "x"]),
    "pause": (ControlCall(0, 5, PauseScheduler("keep", False)), [0, 5, ["pause", "keep", False]]),
    "resume": (ControlCall(0, 5, ResumeScheduler()), [0, 5, ["resume"]]),
    "is-paused": (ControlCall(0, 5, IsPaused()), [0, 5, ["is_paused"]]),
    "reset": (ControlCall(0, 5, ResetPrefixCache(True)), [0, 5, ["reset_prefix_cache", True]]),
    "integrity": (ControlCall(0, 5, CheckIntegrity()), [0, 5, ["check_integrity"]]),
    "vocabulary": (
        ControlCall(0, 5, SetVocabulary([b"a", b""], [1], [1])),
        [0, 5, ["set_vocabulary", [b"a", b""], [1], [1]]],
    ),
    "hello": (Hello("1.0", 7), {"type": "hello", "version": "1.0", "pid": 7}),
    "failed": (StartFailed("m", 4), {"type": "start_failed", "message": "m", "exit_code": 4}),
    "progress": (LoadProgress("s"), {"type": "progress", "stage": "s"}),
    "ready": (
        READY,
        {"type": "ready"} | {name: getattr(READY, name) for name in Ready.__struct_fields__},
    ),
    "cache-config": (KVCacheConfig(65, 16), [65, 16]),
    "scheduler-output": (
        SchedulerOutput(
            4,
            [NewRequestData("a", [1], 1, SamplingParams(), [3], 0)],
            CachedRequestData(["b"], [[5]], [16]),
            {"a": 1, "b": 1},
            2,
            ["c"],
            ["d"],
            ["a"],
            True,
        ),
        [
            *(4, [["a", [1], 1, PLAIN_DEFAULT_PARAMS, [3], 0, None, None]], [["b"], [[5]], [16]]),
            *({"a": 1, "b": 1}, 2, ["c"], ["d"], ["a"], True),
        ],
    ),
    "runner-output": (
        ModelRunnerOutput(["a"], [[4]], {"a": TABLE}, {"a": TABLE}, {"b": "x"}, {"c": np.ones(1, np.int32)}),
        [["a"], [[4]], {"a": PLAIN_TABLE}, {"a": PLAIN_TABLE}, {"b": "x"}, {"c": ["<i4", [1], INLINE]}],
    ),
    "grammar-output": (GrammarOutput(["a"], np.ones(1, np.int32)), [["a"], ["<i4", [1], INLINE]]),
}


@pytest.mark.parametrize("name", CASES)
def test_messages_have_the_frozen_field_order(name: str) -> None:
    message, plain = CASES[name]
    assert MsgpackEncoder().encode(message) == [msgspec.msgpack.encode(plain)]


def test_a_token_is_few_bytes() -> None:
    # fixarray(10) fixstr(1) "a" fixarray(1) 4, then eight times nil
    assert MsgpackEncoder().encode(EngineCoreOutput("a", [4])) == [bytes.fromhex("9aa1619104" + "c0" * 8)]


def test_type_bytes_and_the_death_notice_are_fixed() -> None:
    assert [kind.value for kind in RequestType] == [b"\x00", b"\x01", b"\x03"]
    assert ENGINE_CORE_DEAD == b"ENGINE_CORE_DEAD"
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error", "repetition"]
    assert list(FinishReason) == [0, 1, 2, 3, 4]
