"""Phases 2 and 11 of 11: requests are registered, and the engine's outputs become one merged hand-over for each.

A request is registered here before it is submitted, so no output can arrive without a home; outputs of requests that
were aborted meanwhile are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from serve.engine.detokenizer import Detokenizer, new_detokenizer
from serve.engine.logprobs import LogprobsProcessor, TokenTexts
from serve.engine.outputs import CompletionOutput, RequestOutput
from serve.engine.parallel_sampling import ParentRequest
from serve.engine.stats import EngineStats, RequestTimes
from serve.errors import InvalidRequest, RequestFailed, ServeError
from serve.renderers.tokenizer import Tokenizer
from serve.sampling_params import OutputKind
from serve.wire.frontend import EngineCoreOutput, EngineCoreRequest, FinishReason

log = logging.getLogger(__name__)

REPETITION_DETECTED: Final = "repetition_detected"


class RequestOutputCollector:
    """A queue of at most one pending hand-over: a slow reader gets larger ones, and memory stays flat."""

    __slots__ = ("_arrived", "_error", "_is_delta", "_pending")

    def __init__(self, output_kind: OutputKind) -> None:
        self._is_delta = output_kind == OutputKind.DELTA
        self._pending: RequestOutput | None = None
        self._error: ServeError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add a hand-over; it joins the pending one. Nothing follows an error."""
        if self._error is not None:
            return
        if self._pending is None:
            self._pending = output
            self._arrived.set()
        else:
            _merge(self._pending, output, is_delta=self._is_delta)

    def fail(self, error: ServeError) -> None:
        """Put an error in the place of whatever is pending; the first error stays."""
        if self._error is None:
            self._error = error
            self._pending = None
            self._arrived.set()

    @property
    def has_failed(self) -> bool:
        """True after fail."""
        return self._error is not None

    def get_nowait(self) -> RequestOutput | None:
        """Give the pending hand-over, if any, or raise the error."""
        if self._error is not None:
            raise self._error
        output, self._pending = self._pending, None
        self._arrived.clear()
        return output

    async def get(self) -> RequestOutput:
        """Wait for a hand-over, or raise the error."""
        while (output := self.get_nowait()) is None:
            await self._arrived.wait()
        return output


def _merge(pending: RequestOutput, new: RequestOutput, *, is_delta: bool) -> None:
    """Fold a newer hand-over of the same request into one that was not read yet."""
    for choice in new.outputs:
        for position, old in enumerate(pending.outputs):
            if old.index != choice.index:
                continue
            if is_delta:
                _append(old, choice)
            else:
                pending.outputs[position] = choice
            break
        else:
            pending.outputs.append(choice)
    pending.num_generated_tokens.update(new.num_generated_tokens)
    pending.finished = new.finished
    pending.num_cached_tokens = new.num_cached_tokens
    if new.prompt_logprobs is not None:
        pending.prompt_logprobs = new.prompt_logprobs


def _append(old: CompletionOutput, new: CompletionOutput) -> None:
    old.text += new.text
    old.token_ids.extend(new.token_ids)
    if new.logprobs is not None:
        old.logprobs = new.logprobs if old.logprobs is None else old.logprobs + new.logprobs
    if new.finish_reason is not None:
        old.finish_reason = new.finish_reason
        old.stop_reason = new.stop_reason


class ClientRequest:
    """What the choices of one client request share: its collector, its parent when n > 1, the ids still running."""

    __slots__ = ("cached_tokens", "collector", "external_id", "max_generated", "n", "parent", "pooled", "unfinished")

    def __init__(self, external_id: str, collector: RequestOutputCollector, parent: ParentRequest | None) -> None:
        self.external_id = external_id
        self.collector = collector
        self.parent = parent
        self.n = parent.n if parent is not None else 1
        self.unfinished: set[str] = set()
        self.cached_tokens = 0
        self.max_generated = 0
        self.pooled: np.ndarray | None = None


@dataclass(slots=True)
class RequestState:
    """One engine request, from registration to its last output."""

    request_id: str
    client: ClientRequest
    index: int
    prompt_token_ids: list[int]
    output_kind: OutputKind
    detokenizer: Detokenizer
    logprobs: LogprobsProcessor | None
    has_logprobs: bool
    times: RequestTimes
    token_ids: list[int]  # not handed over yet for DELTA, else all so far
    num_generated: int = 0
    num_unsent: int = 0
    has_output: bool = False


class OutputProcessor:
    """Registers requests and turns the engine's outputs into hand-overs. Belongs to the event loop's thread."""

    def __init__(self, tokenizer: Tokenizer, *, stats: EngineStats, stream_interval: int = 1) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._stats = stats
        self._stream_interval = stream_interval
        self._states: dict[str, RequestState] = {}
        self._by_external_id: dict[str, set[str]] = {}
        self.idle = asyncio.Event()  # set while no request is registered
        self.idle.set()
        self.num_without_output = 0
        self.prompt_tokens_without_output = 0

    @property
    def num_unfinished(self) -> int:
        """Number of engine requests that are registered."""
        return len(self._states)

    def add_request(self, request: EngineCoreRequest, client: ClientRequest, *, index: int, arrival: float) -> None:
        """Register an engine request; arrival is this process's monotonic time."""
        params = request.sampling_params
        has_logprobs = params.logprobs is not None
        wants_table = has_logprobs or params.prompt_logprobs is not None
        prompt = request.prompt_token_ids
        self._states[request.request_id] = RequestState(
            request_id=request.request_id,
            client=client,
            index=index,
            prompt_token_ids=prompt,
            output_kind=params.output_kind,
            detokenizer=new_detokenizer(self._tokenizer, prompt, params),
            logprobs=LogprobsProcessor(self._texts) if wants_table else None,
            has_logprobs=has_logprobs,
            times=RequestTimes(arrival, len(prompt), params.max_tokens),
            token_ids=[],
        )
        client.unfinished.add(request.request_id)
        self._by_external_id.setdefault(client.external_id, set()).add(request.request_id)
        self.num_without_output += 1
        self.prompt_tokens_without_output += len(prompt)
        self.idle.clear()

    def internal_ids(self, external_id: str) -> list[str]:
        """Give the registered engine requests under a client's id."""
        return list(self._by_external_id.get(external_id, ()))

    def process_outputs(self, outputs: Iterable[EngineCoreOutput], timestamp: float) -> list[str]:
        """Take the outputs of one step (or a slice of them); give the ids that the engine must abort.

        timestamp is the engine's. An error in one request's text or logprobs fails that request only.
        """
        aborts: list[str] = []
        states = self._states
        for output in outputs:
            state = states.get(output.request_id)
            if state is None:
                continue
            try:
                self._process(state, output, timestamp, aborts)
            except Exception:
                # Part of the output task, which must survive whatever one request's data does to it.
                log.exception("request failed while its output was prepared: id=%s", state.request_id)
                error = RequestFailed("the output of this request could not be prepared", cause="output_error")
                self._fail(state, error, aborts)
                if output.finish_reason is None:
                    aborts.append(state.request_id)
        return aborts

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Forget requests that a client gave up; give those that were registered, for the engine to abort.

        A reader that is still there gets what was generated, finished with reason abort.
        """
        aborted: list[str] = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is None:
                continue
            aborted.append(request_id)
            self._hand_over(state, FinishReason.ABORT, None)
            self._remove(state, FinishReason.ABORT)
        return aborted

    def fail_all(self, error: ServeError) -> None:
        """End every request with an error; used when the engine is gone."""
        for state in list(self._states.values()):
            state.client.collector.fail(error)
            self._remove(state, FinishReason.ERROR)

    def _process(self, state: RequestState, output: EngineCoreOutput, timestamp: float, aborts: list[str]) -> None:
        token_ids, reason = output.new_token_ids, output.finish_reason
        if output.events is not None:
            self._stats.on_events(state.times, output.events)
        if not state.has_output and (token_ids or reason is not None):
            self._on_first_output(state, output)
        if reason is FinishReason.ERROR:
            self._fail(state, _engine_error(output.error), aborts)
            return
        if token_ids:
            self._stats.on_tokens(state.times, len(token_ids), timestamp)
            state.num_generated += len(token_ids)
            state.num_unsent += len(token_ids)
            state.token_ids.extend(token_ids)
        stop_reason: int | str | None = output.stop_reason
        if reason is FinishReason.REPETITION:
            stop_reason = REPETITION_DETECTED
        stop = state.detokenizer.update(token_ids, ends_on_stop_token=reason is FinishReason.STOP)
        if stop is not None:
            if reason is None:
                aborts.append(state.request_id)
            reason, stop_reason = FinishReason.STOP, stop
        if state.logprobs is not None:
            if output.new_logprobs is not None:
                state.logprobs.update(output.new_logprobs)
            if output.new_prompt_logprobs is not None:
                state.logprobs.set_prompt(output.new_prompt_logprobs)
        if output.pooling_output is not None:
            state.client.pooled = output.pooling_output
        if reason is not None or self._is_due(state):
            self._hand_over(state, reason, stop_reason)
        if reason is not None:
            self._remove(state, reason)

    def _on_first_output(self, state: RequestState, output: EngineCoreOutput) -> None:
        state.has_output = True
        self.num_without_output -= 1
        self.prompt_tokens_without_output -= len(state.prompt_token_ids)
        if output.prefill_stats is not None:
            self._stats.on_prefill(output.prefill_stats)
            if state.index == 0:
                state.client.cached_tokens = output.prefill_stats.num_cached_tokens

    def _is_due(self, state: RequestState) -> bool:
        """The first token goes at once, then every stream_interval tokens."""
        if state.output_kind == OutputKind.FINAL_ONLY or not state.num_unsent:
            return False
        return state.num_unsent >= self._stream_interval or state.num_unsent == state.num_generated

    def _hand_over(self, state: RequestState, reason: FinishReason | None, stop_reason: int | str | None) -> None:
        is_delta = state.output_kind == OutputKind.DELTA
        token_ids = state.token_ids
        if is_delta:
            state.token_ids = []
        else:
            token_ids = token_ids.copy()
        logprobs = state.logprobs
        choice = CompletionOutput(
            state.index,
            state.detokenizer.take(is_final=reason is not None),
            token_ids,
            logprobs.take(is_delta=is_delta) if logprobs is not None and state.has_logprobs else None,
            reason,
            stop_reason,
        )
        state.num_unsent = 0
        client = state.client
        parent = client.parent
        prompt_logprobs = logprobs.take_prompt() if logprobs is not None else None
        if parent is None:
            outputs, finished = [choice], reason is not None
            num_generated = {state.index: state.num_generated}
        else:
            if prompt_logprobs is not None:
                parent.prompt_logprobs = prompt_logprobs
            outputs = parent.fold(choice, state.num_generated)
            if not outputs:
                return
            finished, num_generated = parent.is_finished, parent.num_generated.copy()
            prompt_logprobs, parent.prompt_logprobs = parent.prompt_logprobs, None
        client.collector.put(
            RequestOutput(
                client.external_id,
                state.prompt_token_ids,
                outputs,
                finished,
                client.cached_tokens,
                prompt_logprobs,
                num_generated,
                pooled=client.pooled,
            )
        )

    def _fail(self, state: RequestState, error: ServeError, aborts: list[str]) -> None:
        """End a client's request with an error; its other choices are aborted in the engine too."""
        client = state.client
        client.collector.fail(error)
        for request_id in list(client.unfinished):
            if request_id != state.request_id:
                aborts.append(request_id)
                self._remove(self._states[request_id], FinishReason.ABORT)
        self._remove(state, FinishReason.ERROR)

    def _remove(self, state: RequestState, reason: FinishReason) -> None:
        client, request_id = state.client, state.request_id
        if self._states.pop(request_id, None) is None:
            return
        if not state.has_output:
            self.num_without_output -= 1
            self.prompt_tokens_without_output -= len(state.prompt_token_ids)
        client.unfinished.discard(request_id)
        siblings = self._by_external_id[client.external_id]
        siblings.discard(request_id)
        if not siblings:
            del self._by_external_id[client.external_id]
        client.max_generated = max(client.max_generated, state.num_generated)
        self._stats.on_finished(state.times, reason)
        if not client.unfinished:
            self._stats.on_client_request_finished(client.n, client.max_generated)
        if not self._states:
            self.idle.set()


def _engine_error(error: str | None) -> ServeError:
    """Give the failure that the engine reported as "cause: text"; invalid_request is the client's mistake."""
    text = error or "model_error: the request failed in the engine"
    cause, _, problem = text.partition(":")
    if cause == "invalid_request":
        return InvalidRequest(problem.strip())
    return RequestFailed(text, cause=cause.strip())
