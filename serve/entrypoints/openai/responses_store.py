"""Responses that can be asked for again: a bounded store in memory, and the events of those that run by themselves."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Final

import msgspec

from serve.entrypoints.openai.responses_output import RUNNING, ResponseObject
from serve.errors import InvalidRequest, NotFound, Overloaded

_decode_items: Final = msgspec.json.Decoder(list[dict[str, object]]).decode
_encode = msgspec.json.encode


class EventLog:
    """The events of one stream, kept so that several readers can follow and come back; the index is the number."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_closed = False
        self._changed = asyncio.Event()

    def add(self, events: Iterable[bytes], *, is_last: bool) -> None:
        """Take the next events and wake the readers."""
        for event in events:
            self._events.append(event)
            self.num_bytes += len(event)
        self._is_closed = is_last
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, start: int) -> AsyncGenerator[bytes, None]:
        """Give the events from a number on, joined as they are there, to the last one; the first block may be empty."""
        while True:
            is_closed, changed = self._is_closed, self._changed
            block = b"".join(self._events[start:])
            start = max(start, len(self._events))
            yield block
            if is_closed:
                return
            await changed.wait()


class StoredResponse:
    """A Response with the conversation that led to it, as bytes: that is what its place in the store is measured by.

    task and events belong to a background response; events is None unless it is streamed.
    """

    def __init__(self, response: ResponseObject, context: Iterable[Mapping[str, object]]) -> None:
        self.response_id = response.response_id
        self.is_background = False
        self.task: asyncio.Task[None] | None = None
        self.events: EventLog | None = None
        self.item_ids: tuple[str, ...] = ()
        self.has_ended = asyncio.Event()
        self._live: ResponseObject | None = response
        self._body = b""
        self._context = _encode(list(context))

    @property
    def is_running(self) -> bool:
        """True until the answer has ended."""
        return self._live is not None and self._live.status in RUNNING

    @property
    def num_bytes(self) -> int:
        """The memory that counts: object, conversation and events."""
        events = 0 if self.events is None else self.events.num_bytes
        return len(self._body) + len(self._context) + events

    def body(self) -> bytes:
        """Give the Response as JSON, as it is now."""
        return self._body if self._live is None else _encode(self._live.describe())

    def context(self) -> list[dict[str, object]]:
        """Give the items before the answer: what the request brought, after what it went on from."""
        return _decode_items(self._context)

    def conversation(self) -> list[dict[str, object]]:
        """Give all items that a next request goes on from."""
        output = msgspec.json.decode(self.body())["output"]
        return self.context() + _decode_items(_encode(output))

    def settle(self) -> None:
        """Keep the finished Response as bytes only."""
        assert self._live is not None, "a response ends once"
        self.item_ids = tuple(item.item_id for item in self._live.output)
        self._body, self._live = _encode(self._live.describe()), None
        self.has_ended.set()


class ResponseStore:
    """Finished and running responses by id; past its bounds the least recently used finished ones are dropped."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._records: OrderedDict[str, StoredResponse] = OrderedDict()
        self._item_owners: dict[str, str] = {}

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._records

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """The memory that finished responses take."""
        return self._num_bytes

    def check_room(self) -> None:
        """Raise InvalidRequest when nothing is stored here, Overloaded when all that is stored still runs."""
        if self._max_count == 0:
            raise InvalidRequest(
                "background is not possible: this server stores no responses (--max-stored-responses 0)",
                param="background",
            )
        if sum(record.is_running for record in self._records.values()) >= self._max_count:
            raise Overloaded(
                f"overloaded: {self._max_count} background responses are running, the limit of --max-stored-responses; "
                "try again when one has ended"
            )

    def add_running(self, record: StoredResponse) -> None:
        """Keep a response that has begun; it cannot be dropped before settle()."""
        self._records[record.response_id] = record

    def settle(self, record: StoredResponse) -> None:
        """Keep a response that has ended, and drop old ones to make room; one larger than the store is not kept."""
        record.settle()
        if record.num_bytes > self._max_bytes:
            self._records.pop(record.response_id, None)
            return
        self._records[record.response_id] = record
        self._records.move_to_end(record.response_id)
        self._num_bytes += record.num_bytes
        for item_id in record.item_ids:
            self._item_owners[item_id] = record.response_id
        self._drop_excess()

    def get(self, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Give a response and note its use. Raises NotFound."""
        record = self._records.get(response_id)
        if record is None:
            raise NotFound(
                f"there is no response {response_id[:80]!r}: it was never stored (store: false), was deleted, or made "
                "room for newer ones",
                param=param,
            )
        self._records.move_to_end(response_id)
        return record

    def find_item(self, item_id: str) -> dict[str, object] | None:
        """Give an output item of a kept response."""
        owner = self._item_owners.get(item_id)
        if owner is None:
            return None
        return next((item for item in self.get(owner).conversation() if item.get("id") == item_id), None)

    def remove(self, response_id: str) -> None:
        """Forget a response that has ended. Raises NotFound."""
        record = self.get(response_id)
        del self._records[response_id]
        self._num_bytes -= record.num_bytes
        for item_id in record.item_ids:
            self._item_owners.pop(item_id, None)

    def _drop_excess(self) -> None:
        while len(self._records) > self._max_count or self._num_bytes > self._max_bytes:
            oldest = next((key for key, record in self._records.items() if not record.is_running), None)
            if oldest is None:
                return
            self.remove(oldest)
