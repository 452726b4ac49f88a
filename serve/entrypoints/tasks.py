"""Which of the API a loaded model can serve, and what a request gets that asks for the rest."""

from __future__ import annotations

from serve.checkpoint import PoolerConfig
from serve.engine.async_llm import AsyncLLM
from serve.errors import NotFound
from serve.pooling_params import PoolingTask

UNSUPPORTED_TASK = "unsupported_task"


def require_generation(llm: AsyncLLM) -> None:
    """Raise NotFound when the model generates no text."""
    if llm.pooling is not None:
        raise NotFound(f"this model does not generate text: {_describe(llm.pooling)}", code=UNSUPPORTED_TASK)


def require_pooling(llm: AsyncLLM, task: PoolingTask) -> PoolerConfig:
    """Give how the model pools; raise NotFound when the task is not one of its own."""
    pooler = _require_pooler(llm)
    if task not in pooler.tasks:
        raise NotFound(f"this model does not do the task {task}: {_describe(pooler)}", code=UNSUPPORTED_TASK)
    return pooler


def require_scoring(llm: AsyncLLM) -> PoolerConfig:
    """Give how the model pools; raise NotFound when it cannot say how well two texts fit each other."""
    pooler = _require_pooler(llm)
    if pooler.task == "classify" and not pooler.scores_pairs:
        raise NotFound(
            f"this model does not score pairs of texts: it has {len(pooler.labels)} labels and one is needed; "
            f"{_describe(pooler)}",
            code=UNSUPPORTED_TASK,
        )
    return pooler


def _require_pooler(llm: AsyncLLM) -> PoolerConfig:
    if llm.pooling is None:
        raise NotFound(
            "this model gives no pooled results: its task is generate; use /v1/chat/completions or /v1/completions",
            code=UNSUPPORTED_TASK,
        )
    return llm.pooling


def _describe(pooler: PoolerConfig) -> str:
    if pooler.task == "embed":
        paths = "/v1/embeddings, /pooling, /score or /rerank"
    else:
        paths = "/classify, /pooling, /score or /rerank" if pooler.scores_pairs else "/classify or /pooling"
    return f"its task is {pooler.task}; use {paths}"


def example_request(name: str, pooler: PoolerConfig | None) -> tuple[str, str]:
    """Give a path and a body that a person may try on a model, None for one that generates."""
    if pooler is None:
        messages = '"messages": [{"role": "user", "content": "Hello!"}]'
        return "/v1/chat/completions", f'{{"model": "{name}", {messages}, "max_tokens": 64, "temperature": 0}}'
    if pooler.task == "embed":
        return "/v1/embeddings", f'{{"model": "{name}", "input": "Hello!"}}'
    if pooler.scores_pairs:
        return "/score", f'{{"model": "{name}", "text_1": "Who are you?", "text_2": "A server."}}'
    return "/classify", f'{{"model": "{name}", "input": "Hello!"}}'
