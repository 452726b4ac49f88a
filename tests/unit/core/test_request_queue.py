"""Order and removal of waiting requests, against a sorted list."""

from __future__ import annotations

import random
import time

import pytest

from serve.core.request import Request
from serve.core.request_queue import FCFSQueue, PriorityQueue, make_queue
from tests.unit.core.scripted import make_request


def ids(queue: FCFSQueue | PriorityQueue) -> list[str]:
    return [request.req_id for request in queue]


def test_first_come_is_first_served_and_a_prepended_request_comes_before() -> None:
    queue = FCFSQueue()
    a, b, c = (make_request(name, 1, priority=p) for name, p in (("a", 3), ("b", 1), ("c", 2)))
    queue.add(a)
    queue.add(b)
    queue.prepend(c)
    assert ids(queue) == ["c", "a", "b"]
    assert queue.peek() is c
    assert [queue.pop() for _ in range(3)] == [c, a, b]
    assert len(queue) == 0


def test_promoted_requests_come_behind_prepended_ones_and_before_those_that_arrived() -> None:
    queue = FCFSQueue()
    a, b, c, d, e = (make_request(name, 1) for name in "abcde")
    queue.add(a)
    queue.promote(b)
    queue.prepend(c)
    queue.add(d)
    queue.promote(e)
    assert ids(queue) == ["c", "b", "e", "a", "d"]
    queue.remove(b)
    assert [queue.pop() for _ in range(4)] == [c, e, a, d]
    with pytest.raises(KeyError):
        queue.remove(b)


def test_a_promoted_request_stands_where_its_priority_puts_it() -> None:
    queue = PriorityQueue()
    queue.add(make_request("a", 1, priority=1))
    queue.promote(make_request("b", 1, priority=2))
    queue.promote(make_request("c", 1, priority=0))
    assert ids(queue) == ["c", "a", "b"]


def test_smaller_priority_goes_first_then_earlier_arrival_then_id() -> None:
    queue = PriorityQueue()
    for name, priority, arrival in (("d", 1, 0.0), ("b", 0, 2.0), ("c", 0, 1.0), ("a", 0, 2.0)):
        queue.add(make_request(name, 1, priority=priority, arrival_time=arrival))
    assert ids(queue) == ["c", "a", "b", "d"]
    assert [queue.pop().req_id for _ in range(4)] == ["c", "a", "b", "d"]


def test_a_preempted_request_keeps_its_priority() -> None:
    queue = PriorityQueue()
    queue.add(make_request("urgent", 1, priority=0))
    queue.prepend(make_request("preempted", 1, priority=5))
    assert queue.peek().req_id == "urgent"


def test_a_removed_request_that_comes_back_stands_once() -> None:
    queue = PriorityQueue()
    request = make_request("a", 1)
    queue.add(request)
    queue.remove(request)
    queue.add(request)
    assert queue.pop() is request
    assert len(queue) == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_random_use_agrees_with_a_sorted_list(policy: str) -> None:
    rng = random.Random(5)
    queue = make_queue(policy)
    model: list[Request] = []
    for number in range(3000):
        action = rng.random()
        if action < 0.5 or not model:
            request = make_request(f"{number:05d}", 1, priority=rng.randrange(4), arrival_time=float(number))
            queue.add(request)
            model.append(request)
        elif action < 0.8:
            request = model.pop(rng.randrange(len(model)))
            queue.remove(request)
        else:
            best = min(model, key=lambda r: (r.priority, r.arrival_time)) if policy == "priority" else model[0]
            assert queue.peek() is best
            assert queue.pop() is best
            model.remove(best)
        assert len(queue) == len(model)
    expected = sorted(model, key=lambda r: (r.priority, r.arrival_time)) if policy == "priority" else model
    assert list(queue) == expected


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_removal_does_not_slow_down_with_length(policy: str) -> None:
    queue = make_queue(policy)
    requests = [make_request(f"{i:06d}", [1], arrival_time=float(i)) for i in range(20_000)]
    for request in requests:
        queue.add(request)
    random.Random(1).shuffle(requests)
    start = time.process_time()
    for request in requests:
        queue.remove(request)
    # Linear removal would take minutes; the limit leaves room for a loaded machine.
    assert time.process_time() - start < 2.0
    assert len(queue) == 0
