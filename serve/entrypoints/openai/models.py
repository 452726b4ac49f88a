"""GET /v1/models and /v1/models/{id}: the names this server answers to."""

from __future__ import annotations

from serve.entrypoints.app_state import AppState


def list_models(state: AppState) -> dict[str, object]:
    """Give the list object, one entry per served name."""
    return {"object": "list", "data": [model_card(state, name) for name in state.model_names]}


def get_model(state: AppState, name: str) -> dict[str, object]:
    """Give the entry of one name. Raises NotFound."""
    state.check_model(name)
    return model_card(state, name)


def model_card(state: AppState, name: str) -> dict[str, object]:
    """Describe the model under one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "serve",
        "root": state.model_root,
        "parent": None,
        "max_model_len": state.serving().llm.max_model_len,
        "permission": [],
    }
