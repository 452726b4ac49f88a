"""The store of responses: its bounds, what it drops first, and the log of a background stream."""

from __future__ import annotations

import asyncio

import pytest

from serve.entrypoints.openai.responses_output import OutputItem, ResponseObject, Status
from serve.entrypoints.openai.responses_store import EventLog, ResponseStore, StoredResponse
from serve.errors import InvalidRequest, NotFound, Overloaded

LIMIT_S = 10


def record(name: str, *, text: str = "answer", status: Status = "completed") -> StoredResponse:
    item = OutputItem("message", f"msg_{name}", 0, status="completed", pieces=[text])
    response = ResponseObject(f"resp_{name}", "m", 1, {}, status=status, output=[item])
    return StoredResponse(response, [{"id": f"msg_in_{name}", "type": "message", "role": "user", "content": []}])


def filled(names: str, *, max_count: int = 10, max_bytes: int = 1 << 20) -> ResponseStore:
    store = ResponseStore(max_count, max_bytes)
    for name in names:
        store.settle(record(name))
    return store


def test_the_least_recently_used_response_makes_room() -> None:
    store = filled("abc", max_count=3)
    store.get("resp_a")
    store.settle(record("d"))
    assert [f"resp_{name}" in store for name in "abcd"] == [True, False, True, True]
    with pytest.raises(NotFound, match="resp_b"):
        store.get("resp_b")


def test_bytes_are_bounded_as_well_as_the_count() -> None:
    size = filled("a").num_bytes
    store = filled("abcd", max_bytes=2 * size)
    assert len(store) == 2
    assert store.num_bytes == 2 * size
    assert "resp_d" in store


def test_a_response_larger_than_the_store_drops_nothing_else() -> None:
    store = filled("ab", max_bytes=3 * filled("a").num_bytes)
    store.settle(record("c", text="x" * 10_000))
    assert [f"resp_{name}" in store for name in "abc"] == [True, True, False]


def test_a_store_of_nothing_keeps_nothing_and_says_so_to_background_requests() -> None:
    store = filled("a", max_count=0)
    assert len(store) == 0
    assert store.num_bytes == 0
    with pytest.raises(InvalidRequest, match="--max-stored-responses 0"):
        store.check_room()


def test_responses_that_run_are_never_dropped() -> None:
    store = ResponseStore(2, 1 << 20)
    running = record("run", status="in_progress")
    store.add_running(running)
    for name in "abc":
        store.settle(record(name))
    assert "resp_run" in store
    assert len(store) == 2
    store.add_running(record("other", status="queued"))
    with pytest.raises(Overloaded):
        store.check_room()


def test_an_output_item_is_found_while_its_response_is_kept() -> None:
    store = filled("ab", max_count=2)
    found = store.find_item("msg_a")
    assert found is not None
    assert found["content"] == [{"type": "output_text", "text": "answer", "annotations": [], "logprobs": []}]
    store.remove("resp_a")
    assert store.find_item("msg_a") is None
    assert store.num_bytes == filled("b").num_bytes


def test_the_conversation_is_the_input_and_then_the_output() -> None:
    conversation = filled("a").get("resp_a").conversation()
    assert [item["id"] for item in conversation] == ["msg_in_a", "msg_a"]


def test_readers_of_a_log_join_late_leave_early_and_see_the_same_events() -> None:
    async def work() -> tuple[bytes, bytes]:
        log = EventLog()
        log.add([b"0", b"1"], is_last=False)

        async def read(start: int) -> bytes:
            return b"".join([block async for block in log.read(start)])

        first, late = asyncio.ensure_future(read(0)), asyncio.ensure_future(read(2))
        async for _ in log.read(0):
            break
        log.add([b"2"], is_last=False)
        log.add([b"3"], is_last=True)
        return await asyncio.wait_for(first, LIMIT_S), await asyncio.wait_for(late, LIMIT_S)

    assert asyncio.run(work()) == (b"0123", b"23")


def test_a_closed_log_read_from_its_end_gives_nothing() -> None:
    async def work() -> bytes:
        log = EventLog()
        log.add([b"0"], is_last=True)
        return b"".join([block async for block in log.read(5)])

    assert asyncio.run(work()) == b""
