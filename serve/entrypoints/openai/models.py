"""GET /v1/models and /v1/models/{id}: the names this server answers to."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from serve.entrypoints.app_state import AppState

# Sent by clients of the Messages API, which ask for models at the same paths and read other fields of them.
ANTHROPIC_HEADER: Final = "anthropic-version"


def list_models(state: AppState, *, is_anthropic: bool = False) -> dict[str, object]:
    """Give the list object, one entry per served name; is_anthropic adds what clients of the Messages API read."""
    names = state.model_names
    listed: dict[str, object] = {
        "object": "list",
        "data": [model_card(state, name, is_anthropic=is_anthropic) for name in names],
    }
    if is_anthropic:
        listed |= {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return listed


def get_model(state: AppState, name: str, *, is_anthropic: bool = False) -> dict[str, object]:
    """Give the entry of one name. Raises NotFound."""
    state.check_model(name)
    return model_card(state, name, is_anthropic=is_anthropic)


def model_card(state: AppState, name: str, *, is_anthropic: bool = False) -> dict[str, object]:
    """Describe the model under one of its names."""
    card: dict[str, object] = {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "serve",
        "root": state.model_root,
        "parent": None,
        "max_model_len": state.serving().llm.max_model_len,
        "permission": [],
    }
    if is_anthropic:
        created_at = datetime.fromtimestamp(state.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        card |= {"type": "model", "display_name": name, "created_at": created_at}
    return card
