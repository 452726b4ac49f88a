"""POST /score and /rerank: how well texts fit each other, by a cross-encoder or by the cosine of two embeddings."""

from __future__ import annotations

import time

import msgspec
import numpy as np
from fastapi import Request
from fastapi.responses import Response

from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import run_while_connected, wait_for_disconnect
from serve.entrypoints.openai.generation import Generation, admit, read_body
from serve.entrypoints.openai.pooling_job import (
    Pooled,
    PoolingJob,
    json_reply,
    pooling_usage,
    split_texts,
)
from serve.entrypoints.openai.pooling_protocol import PoolingBody, RerankRequest, ScoreRequest
from serve.entrypoints.openai.protocol import parse_request
from serve.entrypoints.tasks import require_scoring
from serve.errors import InvalidRequest
from serve.pooling_params import PoolingParams


async def create_scores(state: AppState, request: Request) -> Response:
    """Answer POST /score."""
    arrival_time = time.time()
    require_scoring(state.admitting().llm)
    body = parse_request(ScoreRequest, await read_body(state, request))
    generation = admit(state, request, body, prefix="score-", arrival_time=arrival_time)
    limit = state.config.limits.max_num_inputs
    (first_name, first_value), (second_name, second_value) = body.sides()
    firsts, seconds = split_texts(first_value, first_name, limit), split_texts(second_value, second_name, limit)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequest(
            f"{first_name} has {len(firsts)} texts and {second_name} has {len(seconds)}; the first must be one text, "
            "or both lists equally long",
            param=first_name,
        )
    scores, results = await _score(generation, body, firsts, seconds, request)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return json_reply(generation, {"data": data, "usage": pooling_usage(results)})


async def create_ranking(state: AppState, request: Request) -> Response:
    """Answer POST /rerank."""
    arrival_time = time.time()
    require_scoring(state.admitting().llm)
    body = parse_request(RerankRequest, await read_body(state, request))
    generation = admit(state, request, body, prefix="rerank-", arrival_time=arrival_time)
    limit = state.config.limits.max_num_inputs
    queries, documents = split_texts(body.query, "query", limit), split_texts(body.documents, "documents", limit)
    scores, results = await _score(generation, body, queries, documents, request)
    # Documents of one score stay in the order they came in.
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    ranked = [
        {"index": index, "document": {"text": documents[index]}, "relevance_score": scores[index]} for index in best
    ]
    reply = {
        "id": generation.response_id,
        "model": generation.model,
        "usage": pooling_usage(results),
        "results": ranked,
    }
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def _score(
    generation: Generation, body: PoolingBody, firsts: list[str], seconds: list[str], request: Request
) -> tuple[list[float], list[Pooled]]:
    """Score each second text against its first one, or against the only one."""
    pooler = require_scoring(generation.services.llm)
    job = PoolingJob(generation, body)
    work = _by_cosine(job, firsts, seconds) if pooler.task == "embed" else _by_pairs(job, body, firsts, seconds)
    return await run_while_connected(work, wait_for_disconnect(request.receive))


async def _by_pairs(
    job: PoolingJob, body: PoolingBody, firsts: list[str], seconds: list[str]
) -> tuple[list[float], list[Pooled]]:
    repeated = firsts * len(seconds) if len(firsts) == 1 else firsts
    prompts = [await job.render_pair(first, second) for first, second in zip(repeated, seconds, strict=True)]
    results = await job.run(prompts, PoolingParams("classify", None, body.use_activation))
    return [float(result.values[0]) for result in results], results


async def _by_cosine(job: PoolingJob, firsts: list[str], seconds: list[str]) -> tuple[list[float], list[Pooled]]:
    prompts = [await job.render_text(text) for text in (*firsts, *seconds)]
    results = await job.run(prompts, PoolingParams("embed", None, True))
    vectors = np.stack([result.values for result in results]).astype(np.float64)
    left, right = vectors[: len(firsts)], vectors[len(firsts) :]
    scores: list[float] = (left * right).sum(axis=1).tolist()
    return scores, results
