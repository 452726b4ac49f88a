"""Constrained requests through scheduler, worker and the real grammar library: tokens equal a plain search's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from serve.checkpoint import Checkpoint
from serve.config import CacheConfig, EngineConfig, SchedulerConfig, resolve
from serve.core.engine_core import EngineCore
from serve.core.executor.uniproc import UniprocExecutor
from serve.core.request import RequestStatus
from serve.core.scheduler import PauseState
from serve.core.structured_output.manager import StructuredOutputManager
from serve.errors import InvalidRequest
from serve.models.registry import CausalLM
from serve.sampling_params import ReasoningBounds, SamplingParams, StructuredOutputs
from serve.wire.frontend import EngineCoreOutput, EngineCoreRequest, FinishReason, SetVocabulary
from serve.worker.worker import Worker
from tests.unit.core.structured_output.fakes import TextBackend, choice
from tests.unit.worker.test_worker_under_engine_core import CHECKPOINT, MODEL, VOCAB, tokens_of

CHARS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":, .'
WORDS = ("ab", "abc", "12", '{"', '":', "</", "t>", "<t>")
EOS = len(CHARS) + len(WORDS)
TOKENS = [*(char.encode() for char in CHARS), *(word.encode() for word in WORDS), b"<eos>"]
TOKENS += [b""] * (VOCAB - len(TOKENS))
VOCABULARY = SetVocabulary(tokens=TOKENS, special_token_ids=[], eos_token_ids=[EOS])
CHOICES = ("abcab", "abx", "12 12", "q")
WAIT_SECONDS = 60.0


def load_tiny(_c: Checkpoint, _e: EngineConfig, _t: torch.dtype, _d: torch.device) -> CausalLM:
    torch.set_num_threads(1)
    return MODEL


class Driver:
    """An engine core that knows the vocabulary, and a thread that waits when only grammars are awaited."""

    def __init__(self, core: EngineCore, woken: threading.Event) -> None:
        self.core = core
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self._woken = woken

    def add(self, req_id: str, prompt: Sequence[int], **params: object) -> None:
        settings = {"temperature": 0.0, "max_tokens": 24, "eos_token_id": EOS, "all_stop_token_ids": (EOS,), **params}
        request = EngineCoreRequest(req_id, list(prompt), SamplingParams(**settings), 0.0)  # type: ignore[arg-type]
        self.core.add_request(self.core.prepare_request(request))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Turn the loop until nothing is left, or as asked."""
        while self.core.has_work and not until():
            self._woken.clear()
            by_client, is_moving = self.core.step_once()
            for message in by_client.values():
                for output in message.outputs:
                    self.outputs.setdefault(output.request_id, []).append(output)
            if not is_moving:
                assert self._woken.wait(WAIT_SECONDS)

    def is_over(self, *req_ids: str) -> bool:
        return all(req_id in self.outputs and self.reason_of(req_id) is not None for req_id in req_ids)

    def text_of(self, req_id: str) -> str:
        return b"".join(TOKENS[token] for token in tokens_of(self.outputs[req_id]) if token != EOS).decode()

    def reason_of(self, req_id: str) -> FinishReason | None:
        return self.outputs[req_id][-1].finish_reason


@contextmanager
def engine(
    *, is_async: bool, num_blocks: int = 200, budget: int = 64, backend: TextBackend | None = None, policy: str = "fcfs"
) -> Iterator[Driver]:
    config = EngineConfig(
        cache=CacheConfig(num_gpu_blocks_override=num_blocks),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=8,
            async_scheduling=is_async,
            scheduler_reserve_full_isl=False,
            scheduling_policy=policy,
        ),
    )
    executor = UniprocExecutor(
        lambda settings, checkpoint: Worker(settings, checkpoint, load_tiny), resolve(config, 128), CHECKPOINT
    )
    woken = threading.Event()
    core = EngineCore(
        config=resolve(config, 128),
        checkpoint=CHECKPOINT,
        executor=executor,
        report=lambda _: None,
        structured=None
        if backend is None
        else StructuredOutputManager(lambda _: backend, num_buffers=2, num_threads=1, wake=woken.set),
        wake=woken.set,
    )
    core.structured.set_vocabulary(VOCABULARY)
    try:
        yield Driver(core, woken)
    finally:
        if backend is not None:
            backend.released.set()
        core.structured.shutdown()
        executor.shutdown()


BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def greedy_choice(prompt: Sequence[int], choices: Sequence[str]) -> str:
    """Search the most likely tokens that spell one of the choices, with the dense model."""
    text, token_ids = "", list(prompt)
    while True:
        open_texts = [option[len(text) :] for option in choices if option.startswith(text)]
        if open_texts == [""]:
            return text
        allowed = [
            token_id
            for token_id, token in enumerate(TOKENS[:EOS])
            if any(rest.startswith(token.decode()) for rest in open_texts)
        ]
        if "" in open_texts:
            allowed.append(EOS)
        logits = MODEL.dense_logits(token_ids)[-1]
        best = max(allowed, key=lambda token_id: float(logits[token_id]))
        if best == EOS:
            return text
        text += TOKENS[best].decode()
        token_ids.append(best)


def prompts() -> dict[str, list[int]]:
    rng = np.random.default_rng(11)
    return {f"p{length}": [int(t) for t in rng.integers(0, VOCAB, length)] for length in (1, 7, 16, 33, 60)}


@BOTH
@pytest.mark.parametrize("num_blocks", [200, 9], ids=["roomy", "preempting"])
def test_choices_are_the_most_likely_allowed_tokens_beside_free_requests(is_async: bool, num_blocks: int) -> None:
    with engine(is_async=is_async, num_blocks=num_blocks, budget=24) as driver:
        for req_id, prompt in prompts().items():
            driver.add(req_id, prompt, structured_outputs=choice(*CHOICES))
            driver.add(f"free {req_id}", prompt, eos_token_id=None)
        driver.run()
        core = driver.core
        assert core.scheduler.check_integrity() is None
    for req_id, prompt in prompts().items():
        assert driver.text_of(req_id) == greedy_choice(prompt, CHOICES)
        assert driver.reason_of(req_id) is FinishReason.STOP
        assert tokens_of(driver.outputs[f"free {req_id}"]) == MODEL.greedy(prompt, 24)


@BOTH
def test_a_choice_that_begins_another_may_end_or_go_on(is_async: bool) -> None:
    with engine(is_async=is_async) as driver:
        for req_id, prompt in prompts().items():
            driver.add(req_id, prompt, structured_outputs=choice("a", "abc", "abcabc"))
        driver.run()
    for req_id, prompt in prompts().items():
        assert driver.text_of(req_id) == greedy_choice(prompt, ("a", "abc", "abcabc"))
        assert driver.reason_of(req_id) is FinishReason.STOP


@BOTH
def test_sampled_json_parses(is_async: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 12]}},
        "required": ["a", "b"],
    }
    spec = StructuredOutputs("json_schema", json.dumps(schema), disable_additional_properties=True)
    with engine(is_async=is_async) as driver:
        for seed in range(12):
            driver.add(f"{seed}", [seed], temperature=1.0, seed=seed, max_tokens=60, structured_outputs=spec)
        driver.run()
    for seed in range(12):
        value = json.loads(driver.text_of(f"{seed}"))
        assert set(value) == {"a", "b"}
        assert value["b"] in ("x", 12)
        assert driver.reason_of(f"{seed}") is FinishReason.STOP


@BOTH
def test_a_complete_text_ends_at_once_whatever_the_request_says_about_end_tokens(is_async: bool) -> None:
    with engine(is_async=is_async) as driver:
        wedges = {"ignore_eos": True, "eos_token_id": None}, {"min_tokens": 20}
        for index, wedge in enumerate(wedges):
            driver.add(f"fixed {index}", [1, 2], structured_outputs=choice("abcab"), **wedge)
            # Here only the end token can follow "q", but the grammar is not over before it has looked.
            driver.add(f"open {index}", [1, 2], structured_outputs=StructuredOutputs("regex", "q|ab?"), **wedge)
        driver.run()
    for index in range(2):
        assert driver.text_of(f"fixed {index}") == "abcab"
        assert driver.text_of(f"open {index}") in ("q", "ab")
        assert driver.reason_of(f"fixed {index}") is driver.reason_of(f"open {index}") is FinishReason.STOP


@BOTH
def test_max_tokens_cuts_to_a_prefix(is_async: bool) -> None:
    with engine(is_async=is_async) as driver:
        driver.add("cut", [1, 2], max_tokens=3, structured_outputs=StructuredOutputs("regex", "[0-9]{9}"))
        driver.add("whole", [1, 2], max_tokens=5, structured_outputs=choice("x.x.x"))
        driver.run()
    assert driver.reason_of("cut") is FinishReason.LENGTH
    assert driver.text_of("cut").isdigit()
    # The last allowed token completes the text: that is a stop.
    assert (driver.text_of("whole"), driver.reason_of("whole")) == ("x.x.x", FinishReason.STOP)


@BOTH
def test_a_grammar_that_fails_to_compile_ends_its_request_alone(is_async: bool) -> None:
    with engine(is_async=is_async) as driver:
        driver.add("bad", [3], structured_outputs=StructuredOutputs("json_schema", '{"not": {}}'))
        driver.add("good", [3], structured_outputs=choice("q"))
        driver.run()
    error = driver.outputs["bad"][-1].error
    assert error is not None
    assert error.startswith("invalid_request: ")
    assert '"not"' in error
    assert driver.text_of("good") == "q"


@BOTH
def test_own_masks_that_leave_nothing_of_the_grammar_are_the_clients_mistake(is_async: bool) -> None:
    with engine(is_async=is_async) as driver:
        driver.add("none", [3], structured_outputs=choice("q"), allowed_token_ids=(0, 1))
        driver.add("free", [3])
        driver.run()
    assert (driver.outputs["none"][-1].error or "").startswith("invalid_request: ")
    assert driver.outputs["free"][-1].error is None


@BOTH
def test_thinking_is_free_until_its_budget_forces_the_end_and_the_grammar_follows(is_async: bool) -> None:
    end = (TOKENS.index(b"</"), TOKENS.index(b"t>"))
    bounds = ReasoningBounds("</t>", end, None, 5)
    with engine(is_async=is_async) as driver:
        for req_id, prompt in prompts().items():
            driver.add(req_id, prompt, eos_token_id=None, reasoning=bounds, structured_outputs=choice(*CHOICES))
            driver.add(f"budget {req_id}", prompt, eos_token_id=None, reasoning=bounds, max_tokens=12)
        driver.run()
    for req_id, prompt in prompts().items():
        thinking = MODEL.greedy(prompt, 5)
        opening = [*prompt, *thinking, *end]
        assert tokens_of(driver.outputs[req_id])[:7] == [*thinking, *end]
        assert driver.text_of(req_id).split("</t>")[1] == greedy_choice(opening, CHOICES)
        assert tokens_of(driver.outputs[f"budget {req_id}"]) == [*thinking, *end, *MODEL.greedy(opening, 5)]


SLOW = StructuredOutputs("choice", json.dumps(["slow", "q"]))


@BOTH
def test_a_slow_compilation_delays_nobody(is_async: bool) -> None:
    backend = TextBackend(VOCABULARY)
    with engine(is_async=is_async, backend=backend) as driver:
        driver.add("slow", [5], structured_outputs=SLOW)
        for index in range(12):
            driver.add(f"{index}", [index], eos_token_id=None, max_tokens=6)
        driver.run(until=lambda: driver.is_over(*(f"{index}" for index in range(12))))
        assert not backend.released.is_set()
        assert driver.core.scheduler.gauges()[:3] == (0, 0, 1)
        [stats] = [message.scheduler_stats for message in driver.core.take_changed_stats().values()] or [None]
        assert stats is None or stats.num_deferred_reqs == 1
        backend.released.set()
        driver.run()
    for index in range(12):
        assert tokens_of(driver.outputs[f"{index}"]) == MODEL.greedy([index], 6)
    assert driver.text_of("slow") == greedy_choice([5], ["slow", "q"])


def test_a_request_that_waited_for_its_grammar_comes_before_later_ones() -> None:
    backend = TextBackend(VOCABULARY)
    with engine(is_async=False, backend=backend) as driver:
        driver.add("slow", [5], structured_outputs=SLOW)
        for index in range(20):
            driver.add(f"{index}", [index], eos_token_id=None, max_tokens=6 + 6 * (index < 8))
        driver.run(until=lambda: bool(driver.outputs))
        assert len(driver.core.scheduler.waiting) == 12
        backend.released.set()
        driver.run(until=lambda: not driver.core.scheduler.skipped_waiting)
        assert next(iter(driver.core.scheduler.waiting)).req_id == "slow"
        driver.run()
    assert driver.text_of("slow") == greedy_choice([5], ["slow", "q"])


def test_priority_decides_among_those_whose_grammar_is_ready() -> None:
    backend = TextBackend(VOCABULARY)
    with engine(is_async=False, backend=backend, policy="priority") as driver:
        driver.add("slow", [5], structured_outputs=SLOW)
        for index in range(20):
            driver.add(f"{index}", [index], eos_token_id=None, max_tokens=12)
            driver.core.scheduler.requests[f"{index}"].priority = -1
        driver.run(until=lambda: bool(driver.outputs))
        backend.released.set()
        driver.run(until=lambda: not driver.core.scheduler.skipped_waiting)
        assert list(driver.core.scheduler.waiting)[-1].req_id == "slow"
        driver.run()
    assert driver.is_over("slow")


@BOTH
def test_an_abort_while_compiling_leaves_nothing_behind(is_async: bool) -> None:
    backend = TextBackend(VOCABULARY)
    with engine(is_async=is_async, backend=backend) as driver:
        driver.add("slow", [5], structured_outputs=SLOW)
        assert backend.started.wait(WAIT_SECONDS)
        driver.core.abort_requests(["slow"])
        assert driver.core.scheduler.check_integrity() is None
        assert not driver.core.has_work
        driver.add("next", [5], structured_outputs=SLOW)
        backend.released.set()
        driver.run()
    assert "slow" not in driver.outputs
    assert driver.text_of("next") == greedy_choice([5], ["slow", "q"])


def test_aborting_everything_tells_those_that_wait_for_a_grammar() -> None:
    backend = TextBackend(VOCABULARY)
    with engine(is_async=True, backend=backend) as driver:
        driver.add("slow", [5], structured_outputs=SLOW)
        [message] = driver.core.abort_all().values()
    assert [(output.request_id, output.finish_reason) for output in message.outputs] == [("slow", FinishReason.ABORT)]


@BOTH
def test_a_pause_holds_back_a_request_whose_grammar_gets_ready(is_async: bool) -> None:
    backend = TextBackend(VOCABULARY)
    with engine(is_async=is_async, backend=backend) as driver:
        driver.add("slow", [5], structured_outputs=SLOW)
        driver.core.scheduler.pause_state = PauseState.PAUSED_NEW
        assert not driver.core.has_work
        backend.released.set()
        driver.core.scheduler.pause_state = PauseState.UNPAUSED
        driver.run()
    assert driver.text_of("slow") == greedy_choice([5], ["slow", "q"])


@BOTH
def test_a_constrained_request_goes_on_after_the_cache_was_reset_under_it(is_async: bool) -> None:
    with engine(is_async=is_async) as driver:
        driver.add("r", [4, 5, 6], structured_outputs=choice("abcab", "abc12", "x"))
        driver.run(until=lambda: bool(driver.outputs))
        assert driver.core.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert driver.core.scheduler.requests["r"].status is RequestStatus.PREEMPTED
        driver.run()
    assert driver.text_of("r") == greedy_choice([4, 5, 6], ["abcab", "abc12", "x"])


@BOTH
def test_a_grammar_that_fails_in_use_ends_its_request_alone(is_async: bool) -> None:
    backend = TextBackend(VOCABULARY)
    with engine(is_async=is_async, backend=backend) as driver:
        driver.add("fails", [4], structured_outputs=StructuredOutputs("choice", json.dumps(["fails", "abcab"])))
        driver.add("good", [4], structured_outputs=choice("abcab"))
        driver.run()
        assert driver.core.scheduler.check_integrity() is None
    assert driver.outputs["fails"][-1].error == "invalid_request: too complex"
    assert driver.text_of("good") == "abcab"


def test_a_constraint_without_a_vocabulary_is_refused() -> None:
    with engine(is_async=False) as driver:
        core = driver.core
        core.structured = StructuredOutputManager(lambda _: TextBackend(VOCABULARY), num_buffers=1, num_threads=1)
        with pytest.raises(InvalidRequest, match="vocabulary"):
            driver.add("r", [1], structured_outputs=choice("q"))
