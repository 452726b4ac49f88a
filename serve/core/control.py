"""Control calls of the engine core: pause, resume, cache reset, integrity check, vocabulary. Run between steps."""

from __future__ import annotations

import logging

from serve.core.scheduler import PauseState, Scheduler
from serve.core.structured_output.manager import StructuredOutputManager
from serve.wire.frontend import (
    CheckIntegrity,
    ControlCall,
    ControlResult,
    EngineCoreOutputs,
    IsPaused,
    PauseScheduler,
    ResetPrefixCache,
    ResumeScheduler,
    SetVocabulary,
)

log = logging.getLogger(__name__)

# Messages to clients: (client_index, message).
Messages = list[tuple[int, EngineCoreOutputs]]


class ControlPanel:
    """Applies control calls between steps. A pause is answered when what it waits for has happened."""

    def __init__(self, scheduler: Scheduler, structured: StructuredOutputManager) -> None:
        self._scheduler = scheduler
        self._structured = structured
        self._pending: list[tuple[ControlCall, PauseScheduler]] = []

    def call(self, call: ControlCall) -> Messages:
        """Run one call and give its answer; a pause first gives the outputs of the requests it ended."""
        scheduler = self._scheduler
        match call.control:
            case PauseScheduler() as pause:
                return self._pause(call, pause)
            case ResumeScheduler():
                scheduler.pause_state = PauseState.UNPAUSED
                unfinished, self._pending = self._pending, []
                return [*(_answer(pending, False) for pending, _ in unfinished), _answer(call, True)]
            case IsPaused():
                return [_answer(call, scheduler.pause_state is not PauseState.UNPAUSED)]
            case ResetPrefixCache(reset_running_requests=reset_running):
                return [_answer(call, scheduler.reset_prefix_cache(reset_running_requests=reset_running))]
            case CheckIntegrity():
                problem = scheduler.check_integrity()
                if problem is None:
                    return [_answer(call, True)]
                log.error("%s", problem)
                return [refuse(call, problem)]
            case SetVocabulary() as vocabulary:
                self._structured.set_vocabulary(vocabulary)
                return [_answer(call, True)]

    def poll(self) -> Messages:
        """Answer the pauses whose work has drained."""
        if not self._pending or self._scheduler.num_in_flight_steps:
            return []
        done = [entry for entry in self._pending if entry[1].mode == "keep" or not self._scheduler.running]
        self._pending = [entry for entry in self._pending if entry not in done]
        return [self._finish_pause(call, pause) for call, pause in done]

    def _pause(self, call: ControlCall, pause: PauseScheduler) -> Messages:
        self._pending.append((call, pause))
        self._scheduler.pause_state = PauseState.PAUSED_ALL if pause.mode == "keep" else PauseState.PAUSED_NEW
        return list(self._scheduler.abort_all().items()) if pause.mode == "abort" else []

    def _finish_pause(self, call: ControlCall, pause: PauseScheduler) -> tuple[int, EngineCoreOutputs]:
        if pause.clear_cache and not self._scheduler.reset_prefix_cache(reset_running_requests=pause.mode == "keep"):
            return refuse(call, "paused, but the prefix cache could not be cleared: blocks are still in use")
        return _answer(call, True)


def _answer(call: ControlCall, result: bool) -> tuple[int, EngineCoreOutputs]:
    return call.client_index, EngineCoreOutputs(outputs=[], control_result=ControlResult(call.call_id, result=result))


def refuse(call: ControlCall, message: str) -> tuple[int, EngineCoreOutputs]:
    """Give the answer to a call that failed."""
    result = ControlResult(call.call_id, failure_message=message)
    return call.client_index, EngineCoreOutputs(outputs=[], control_result=result)
