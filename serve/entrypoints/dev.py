"""Admin calls of --dev-mode: pause, resume, is_paused, reset_prefix_cache. They need a loopback address."""

from __future__ import annotations

from collections.abc import Mapping

from serve.entrypoints.app_state import AppState
from serve.errors import InvalidRequest

_BOOLS = {"true": True, "1": True, "false": False, "0": False}


async def pause(state: AppState, query: Mapping[str, str]) -> dict[str, object]:
    """Stop admitting work; mode is abort (default), wait or keep."""
    clear_cache = flag(query, "clear_cache", default=True)
    llm = state.serving().llm
    match query.get("mode", "abort"):
        case "abort":
            await llm.pause("abort", clear_cache=clear_cache)
        case "wait":
            await llm.pause("wait", clear_cache=clear_cache)
        case "keep":
            await llm.pause("keep", clear_cache=clear_cache)
        case other:
            raise InvalidRequest(f"mode must be abort, wait or keep, got {other[:40]!r}", param="mode")
    return {"status": "paused"}


async def resume(state: AppState) -> dict[str, object]:
    """Undo a pause."""
    await state.serving().llm.resume()
    return {"status": "resumed"}


async def is_paused(state: AppState) -> dict[str, object]:
    """Tell whether the scheduler is paused."""
    return {"is_paused": await state.serving().llm.is_paused()}


async def reset_prefix_cache(state: AppState, query: Mapping[str, str]) -> dict[str, object]:
    """Drop all cached prefixes; success is false while blocks are in use."""
    resets_running = flag(query, "reset_running_requests", default=False)
    done = await state.serving().llm.reset_prefix_cache(reset_running_requests=resets_running)
    return {"success": done}


def flag(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Read a boolean query parameter."""
    text = query.get(name)
    if text is None:
        return default
    if text.lower() not in _BOOLS:
        raise InvalidRequest(f"{name} must be true or false, got {text[:40]!r}", param=name)
    return _BOOLS[text.lower()]
