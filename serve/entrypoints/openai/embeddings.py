"""POST /v1/embeddings, /pooling and /classify: one result for each input."""

from __future__ import annotations

import time

from fastapi import Request
from fastapi.responses import Response

from serve.checkpoint import PoolerConfig
from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import run_while_connected, wait_for_disconnect
from serve.entrypoints.openai.generation import Generation, admit, read_body
from serve.entrypoints.openai.pooling_job import Pooled, PoolingJob, json_reply, pooling_usage
from serve.entrypoints.openai.pooling_protocol import InputRequest
from serve.entrypoints.openai.protocol import parse_request
from serve.entrypoints.openai.vectors import vector_reply
from serve.entrypoints.tasks import require_pooling
from serve.errors import InvalidRequest
from serve.pooling_params import PoolingParams


async def create_embeddings(state: AppState, request: Request) -> Response:
    """Answer POST /v1/embeddings."""
    arrival_time = time.time()
    require_pooling(state.admitting().llm, "embed")
    body = parse_request(InputRequest, await read_body(state, request))
    generation = admit(state, request, body, prefix="embd-", arrival_time=arrival_time)
    body.check_task("embed")
    params = PoolingParams("embed", body.dimensions, body.use_activation)
    results = await _run(generation, body, params, request)
    return vector_reply(generation, body, results, kind="embedding", key="embedding")


async def create_pooling(state: AppState, request: Request) -> Response:
    """Answer POST /pooling; the task is the model's own when the request names none."""
    arrival_time = time.time()
    llm = state.admitting().llm
    body = parse_request(InputRequest, await read_body(state, request))
    task = body.task or ("embed" if llm.pooling is None else llm.pooling.task)
    require_pooling(llm, task)
    generation = admit(state, request, body, prefix="pool-", arrival_time=arrival_time)
    params = PoolingParams(task, body.dimensions, body.use_activation)
    results = await _run(generation, body, params, request)
    return vector_reply(generation, body, results, kind="pooling", key="data")


async def create_classification(state: AppState, request: Request) -> Response:
    """Answer POST /classify."""
    arrival_time = time.time()
    pooler = require_pooling(state.admitting().llm, "classify")
    body = parse_request(InputRequest, await read_body(state, request))
    generation = admit(state, request, body, prefix="classify-", arrival_time=arrival_time)
    body.check_task("classify")
    if body.encoding_format != "float":
        raise InvalidRequest('encoding_format must be "float" for classes', param="encoding_format")
    params = PoolingParams("classify", body.dimensions, body.use_activation)
    results = await _run(generation, body, params, request)
    data = [_class_entry(index, result, pooler) for index, result in enumerate(results)]
    return json_reply(generation, {"data": data, "usage": pooling_usage(results)})


async def _run(generation: Generation, body: InputRequest, params: PoolingParams, request: Request) -> list[Pooled]:
    job = PoolingJob(generation, body)

    async def work() -> list[Pooled]:
        return await job.run(await job.render_input(body), params)

    return await run_while_connected(work(), wait_for_disconnect(request.receive))


def _class_entry(index: int, result: Pooled, pooler: PoolerConfig) -> dict[str, object]:
    return {
        "index": index,
        "label": pooler.labels[int(result.values.argmax())],
        "probs": result.values.tolist(),
        "num_classes": len(pooler.labels),
    }
