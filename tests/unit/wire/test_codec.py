"""Messages survive the wire unchanged, and nothing else gets through."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from serve.wire.codec import INLINE_LIMIT, MsgpackDecoder, MsgpackEncoder, WireError
from serve.wire.frontend import (
    ControlCall,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    HandshakeFromEngine,
    LogprobsLists,
    Ready,
    ResetPrefixCache,
)
from tests.fakes import ready_message
from tests.unit.wire.messages import MESSAGES, messages_of, same


def table(rows: int) -> LogprobsLists:
    return LogprobsLists(
        np.arange(rows * 3, dtype=np.int32).reshape(rows, 3),
        np.linspace(-5, 0, rows * 3, dtype=np.float32).reshape(rows, 3),
        np.ones(rows, np.int32),
    )


@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda t: t.__name__)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_message_comes_back_equal(message_type: type, data: st.DataObject) -> None:
    message = data.draw(messages_of(message_type))
    frames = [bytes(frame) for frame in MsgpackEncoder().encode(message)]
    assert same(MsgpackDecoder(message_type).decode(frames), message)


def test_small_arrays_ride_in_the_payload_and_large_ones_in_frames_of_their_own() -> None:
    small = MsgpackEncoder().encode(EngineCoreOutput("a", [1], new_logprobs=table(2)))
    large = MsgpackEncoder().encode(EngineCoreOutput("a", [1], new_logprobs=table(100)))
    assert len(small) == 1
    assert [memoryview(f).nbytes for f in large[1:]] == [1200, 1200, 400]
    assert INLINE_LIMIT == 256


def test_strided_arrays_are_sent_by_value() -> None:
    source = np.arange(2000, dtype=np.int32).reshape(50, 40)
    message = LogprobsLists(source[::2, ::2], source.T[:, :3].astype(np.float32), np.ones(25, np.int32))
    frames = [bytes(f) for f in MsgpackEncoder().encode(message)]
    assert same(MsgpackDecoder(LogprobsLists).decode(frames), message)


@pytest.mark.parametrize(
    "array",
    [np.array([object()]), np.array(["text"]), np.zeros(2, np.complex64), np.zeros(2, ">i4"), np.zeros(2, "M8[s]")],
    ids=["object", "str", "complex", "big-endian", "datetime"],
)
def test_arrays_outside_the_list_of_dtypes_are_refused(array: np.ndarray) -> None:
    with pytest.raises(WireError, match="go over the wire"):
        MsgpackEncoder().encode(LogprobsLists(array, array, array))


def test_the_encoder_works_again_after_a_refusal() -> None:
    encoder = MsgpackEncoder()
    with pytest.raises(WireError):
        encoder.encode(LogprobsLists(table(100).token_ids, np.array([object()]), table(100).sampled_ranks))
    assert len(encoder.encode(table(100))) == 4


def array_message(token_ids: object) -> bytes:
    inline = msgspec.msgpack.Ext(3, b"\0" * 4)
    return msgspec.msgpack.encode([token_ids, ["<f4", [1], inline], ["<i4", [1], inline]])


@pytest.mark.parametrize(
    "token_ids",
    [
        ["|O", [1], msgspec.msgpack.Ext(3, b"\0" * 8)],
        ["<i4", [2], msgspec.msgpack.Ext(3, b"\0" * 4)],
        ["<i4", [-1], msgspec.msgpack.Ext(3, b"\0" * 4)],
        ["<i4", [2**62, 4], msgspec.msgpack.Ext(3, b"")],
        ["<i4", [True], msgspec.msgpack.Ext(3, b"\0" * 4)],
        ["<i4", [1] * 9, msgspec.msgpack.Ext(3, b"\0" * 4)],
        ["<i4", "1", msgspec.msgpack.Ext(3, b"\0" * 4)],
        ["<i4", [1], msgspec.msgpack.Ext(4, b"\0" * 4)],
        ["<i4", [1], b"\0" * 4],
        ["<i4", [1], 0],
        ["<i4", [1], 1],
        ["<i4", [1], -1],
        ["<i4", [1], True],
        ["<i4", [1]],
        {"dtype": "<i4"},
        [None, [1], msgspec.msgpack.Ext(3, b"\0" * 4)],
        3,
        None,
    ],
    ids=str,
)
def test_malformed_arrays_are_wire_errors(token_ids: object) -> None:
    with pytest.raises(WireError):
        MsgpackDecoder(LogprobsLists).decode(array_message(token_ids))


def test_a_well_formed_array_of_the_same_make_is_accepted() -> None:
    message = array_message(["<i4", [1, 1], msgspec.msgpack.Ext(3, b"\x05\0\0\0")])
    assert MsgpackDecoder(LogprobsLists).decode(message).token_ids.tolist() == [[5]]


DECODERS = [
    MsgpackDecoder[Any](t)
    for t in (EngineCoreRequest, EngineCoreOutputs, ControlCall, HandshakeFromEngine, list[str], LogprobsLists)
]


@settings(max_examples=300, deadline=None)
@given(frames=st.lists(st.binary(max_size=80), min_size=0, max_size=3))
def test_random_bytes_are_wire_errors_or_messages(frames: list[bytes]) -> None:
    outcomes = []
    for decoder in DECODERS:
        try:
            outcomes.append(decoder.decode(frames))
        except WireError as error:
            outcomes.append(error)
    assert len(outcomes) == len(DECODERS)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_messages_are_wire_errors_or_messages(data: st.DataObject) -> None:
    frames = [
        bytearray(f)
        for f in MsgpackEncoder().encode(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1], table(40))]))
    ]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        position = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "grow"])):
            case "flip":
                frame[position] ^= data.draw(st.integers(1, 255))
            case "cut":
                del frame[max(1, position) :]
            case "grow":
                frame.insert(position, data.draw(st.integers(0, 255)))
    try:
        result: object = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    except WireError as error:
        result = error
    assert isinstance(result, EngineCoreOutputs | WireError)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 200_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x00\xdd\xff\xff\xff\xff\xc0",
        b"\xdb\xff\xff\xff\xffabc",
        b"\xdf\xff\xff\xff\xff\x01",
        b"\xc9\xff\xff\xff\xff\x03",
        msgspec.msgpack.encode(["id", [1], {"pickle": b"\x80\x04."}, 1.0]),
    ],
    ids=["empty", "reserved", "deep", "list32", "outputs32", "str32", "map32", "ext32", "map-as-params"],
)
@pytest.mark.parametrize("decoder", DECODERS, ids=["request", "outputs", "control", "handshake", "ids", "table"])
def test_hostile_payloads_are_wire_errors_without_large_allocations(
    payload: bytes, decoder: MsgpackDecoder[object]
) -> None:
    with pytest.raises(WireError):
        decoder.decode(payload)


def test_unknown_control_tags_are_refused() -> None:
    good = msgspec.msgpack.encode([0, 1, ["reset_prefix_cache", True]])
    assert MsgpackDecoder(ControlCall).decode(good).control == ResetPrefixCache(True)
    for tag in ("eval", "", 7, None):
        with pytest.raises(WireError):
            MsgpackDecoder(ControlCall).decode(msgspec.msgpack.encode([0, 1, [tag, True]]))


def test_a_message_without_frames_is_a_wire_error() -> None:
    with pytest.raises(WireError, match="without a frame"):
        MsgpackDecoder(Ready).decode([])


def test_the_ready_message_is_a_member_of_the_handshake_union() -> None:
    frames = MsgpackEncoder().encode(ready_message())
    assert MsgpackDecoder[Any](HandshakeFromEngine).decode(frames) == ready_message()
