"""Health, readiness and version: answers for supervisors and load balancers; none of them asks the engine."""

from __future__ import annotations

from typing import Final

from serve import __version__
from serve.entrypoints.app_state import AppState, Phase
from serve.errors import Overloaded

# The engine core speaks every two seconds also when it is idle.
MAX_SILENCE_SECONDS: Final = 10.0


def check_health(state: AppState) -> None:
    """Raise unless the model is loaded and the engine core makes progress."""
    if state.phase is Phase.DEAD:
        raise _engine_dead()
    services = state.serving()
    if services.llm.is_errored:
        raise _engine_dead()
    silence = services.llm.heartbeat_age()
    if silence > MAX_SILENCE_SECONDS:
        raise Overloaded(f"engine_stuck: nothing heard from the engine core for {silence:.0f} s", code="engine_stuck")


def _engine_dead() -> Overloaded:
    """Health probes learn of a dead engine as 503; a 500 would count as an error of ours."""
    return Overloaded("engine_dead: the engine core stopped; the server is going down", code="engine_dead")


def check_ready(state: AppState) -> None:
    """Raise unless a new request would be admitted now."""
    services = state.admitting()
    check_health(state)
    if services.llm.is_full:
        raise Overloaded("overloaded: the waiting queue is full", code="queue_full")


def version() -> dict[str, object]:
    """Give the server's version."""
    return {"version": __version__}


def load(state: AppState) -> dict[str, object]:
    """Give the number of requests being answered now."""
    counted = state.num_open_requests if state.config.server.enable_server_load_tracking else 0
    return {"server_load": counted}


def describe_phase(state: AppState) -> dict[str, object]:
    """Say which phase the process is in; it answers while it loads, too."""
    return {"status": "alive", "phase": state.phase.value, "is_ready": state.phase is Phase.READY}
