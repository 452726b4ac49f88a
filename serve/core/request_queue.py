"""Phase 4 of 11: the waiting requests, in order of arrival or of priority.

Every operation is O(1) or O(log n), removal from the middle included, so a step costs the same with ten or ten
thousand requests waiting.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Final, Protocol

from serve.core.request import Request

_COMPACT_AT: Final = 64


class RequestQueue(Protocol):
    """Waiting requests; peek and pop give the next one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def add(self, request: Request) -> None:
        """Queue a request that arrived."""

    def prepend(self, request: Request) -> None:
        """Queue a preempted request before the others, as far as the order allows."""

    def promote(self, request: Request) -> None:
        """Queue a request that arrived earlier and could not run until now, as far forward as the order allows."""

    def peek(self) -> Request:
        """Give the next request and leave it."""

    def pop(self) -> Request:
        """Take the next request."""

    def remove(self, request: Request) -> None:
        """Take out a request wherever it stands."""


class FCFSQueue:
    """First come, first served; a prepended request becomes the first, promoted ones come before those that arrived."""

    def __init__(self) -> None:
        self._prepended: OrderedDict[str, Request] = OrderedDict()
        self._promoted: OrderedDict[str, Request] = OrderedDict()
        self._arrived: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prepended) + len(self._promoted) + len(self._arrived)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._prepended.values(), self._promoted.values(), self._arrived.values())

    def add(self, request: Request) -> None:
        """Queue a request behind all others."""
        self._arrived[request.req_id] = request

    def prepend(self, request: Request) -> None:
        """Queue a request before all others."""
        self._prepended[request.req_id] = request
        self._prepended.move_to_end(request.req_id, last=False)

    def promote(self, request: Request) -> None:
        """Queue a request before all that arrived and never waited for anything else."""
        self._promoted[request.req_id] = request

    def peek(self) -> Request:
        """Give the first request and leave it."""
        return next(iter(self._first().values()))

    def pop(self) -> Request:
        """Take the first request."""
        return self._first().popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Take out a request wherever it stands."""
        for requests in (self._arrived, self._promoted, self._prepended):
            if requests.pop(request.req_id, None) is not None:
                return
        raise KeyError(request.req_id)

    def _first(self) -> OrderedDict[str, Request]:
        return self._prepended or self._promoted or self._arrived


_Key = tuple[int, float, str]


class PriorityQueue:
    """Smaller priority first, then earlier arrival, then id. A removed entry stays in the heap until it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[_Key, Request]] = []
        self._live: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._live.values(), key=_priority_key))

    def add(self, request: Request) -> None:
        """Queue a request at the place its priority gives it."""
        self._live[request.req_id] = request
        heapq.heappush(self._heap, (_priority_key(request), request))

    def prepend(self, request: Request) -> None:
        """Queue a preempted request; its priority decides, as for any other."""
        self.add(request)

    def promote(self, request: Request) -> None:
        """Queue a request that could not run until now; its priority and arrival decide."""
        self.add(request)

    def peek(self) -> Request:
        """Give the most urgent request and leave it."""
        self._drop_dead()
        return self._heap[0][1]

    def pop(self) -> Request:
        """Take the most urgent request."""
        self._drop_dead()
        request = heapq.heappop(self._heap)[1]
        del self._live[request.req_id]
        return request

    def remove(self, request: Request) -> None:
        """Take out a request wherever it stands."""
        del self._live[request.req_id]
        if len(self._heap) > max(_COMPACT_AT, 2 * len(self._live)):
            self._heap = [(_priority_key(r), r) for r in self._live.values()]
            heapq.heapify(self._heap)

    def _drop_dead(self) -> None:
        while self._live.get(self._heap[0][1].req_id) is not self._heap[0][1]:
            heapq.heappop(self._heap)


def _priority_key(request: Request) -> _Key:
    return (request.priority, request.arrival_time, request.req_id)


def make_queue(scheduling_policy: str) -> RequestQueue:
    """Give an empty queue of a policy: fcfs or priority."""
    return PriorityQueue() if scheduling_policy == "priority" else FCFSQueue()
