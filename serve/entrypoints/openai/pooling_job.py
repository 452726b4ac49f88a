"""What the endpoints of pooling models share: inputs become prompts, prompts become results, in windows.

A request may hold thousands of texts. Only so many of them are in the engine at a time, so that one request does not
fill the waiting queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from fastapi.responses import Response

from serve.engine.async_llm import RequestStream
from serve.engine.input_processor import RequestOptions
from serve.entrypoints.openai.generation import Generation, final_output
from serve.entrypoints.openai.pooling_protocol import InputRequest, PoolingBody
from serve.entrypoints.openai.prompts import TextOrIds, holds_many, read_text, split_prompts
from serve.errors import InvalidRequest, RequestFailed
from serve.limits import check_count
from serve.pooling_params import PoolingParams
from serve.renderers.pairs import PairTokens
from serve.renderers.renderer import ChatRenderRequest, TokenizeParams

_WINDOW: Final = 256


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of one prompt and the number of its tokens."""

    values: np.ndarray
    num_prompt_tokens: int


def split_input(value: object, limit: int) -> list[TextOrIds]:
    """Give the prompts of `input` as a list of at most limit entries."""
    if isinstance(value, list) and holds_many(value):
        check_count(value, limit, param="input", what="entries", flag_name="--max-num-inputs")
    return split_prompts(value, "input")


def split_texts(value: object, name: str, limit: int) -> list[str]:
    """Give a text or a list of texts as a list; a document may be an object with a field text."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise InvalidRequest(f"{name} must be a string or a list of strings", param=name)
    if not items:
        raise InvalidRequest(f"{name} must not be an empty list", param=name)
    check_count(items, limit, param=name, what="texts", flag_name="--max-num-inputs")
    texts = []
    for index, item in enumerate(items):
        where = name if isinstance(value, str) else f"{name}.{index}"
        texts.append(read_text(item.get("text") if isinstance(item, dict) else item, where))
    return texts


class PoolingJob:
    """One request to a pooling model: renders its prompts and runs them."""

    def __init__(self, generation: Generation, body: PoolingBody) -> None:
        self._generation = generation
        self._body = body
        self._num_submitted = 0

    async def render_input(self, body: InputRequest) -> list[PairTokens]:
        """Give the prompts of `input`, or the one of `messages`."""
        limit = self._generation.state.config.limits.max_num_inputs
        if body.messages is not None:
            return [await self._render_chat(body, body.messages)]
        is_special = body.add_special_tokens is not False
        return [await self._render(item, is_special=is_special) for item in split_input(body.input, limit)]

    async def render_pair(self, first: str, second: str) -> PairTokens:
        """Give the prompt of two texts as the tokenizer joins them."""
        return await self._generation.services.renderer.render_texts((first, second), self._params(is_special=True))

    async def render_text(self, text: str) -> PairTokens:
        """Give the prompt of a text."""
        return await self._render(text, is_special=True)

    async def _render(self, item: TextOrIds, *, is_special: bool) -> PairTokens:
        renderer, params = self._generation.services.renderer, self._params(is_special=is_special)
        if isinstance(item, str):
            return await renderer.render_texts((item,), params)
        return PairTokens(renderer.check_token_ids(item, params).token_ids)

    async def _render_chat(self, body: InputRequest, messages: list[dict[str, object]]) -> PairTokens:
        renderer = self._generation.services.renderer
        if renderer.template_text(body.chat_template, has_tools=False) is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot take messages; send input, or start the server with "
                "--chat-template FILE",
                param="messages",
            )
        request = ChatRenderRequest(
            messages=messages,
            tokenize=self._params(is_special=body.add_special_tokens is True),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        return PairTokens((await renderer.render_chat(request)).token_ids)

    def _params(self, *, is_special: bool) -> TokenizeParams:
        body = self._body
        return TokenizeParams(
            add_special_tokens=is_special,
            max_total_tokens=self._generation.services.llm.max_model_len,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side or "right",
        )

    async def run(self, prompts: Sequence[PairTokens], params: PoolingParams) -> list[Pooled]:
        """Give the results of prompts, in order. When one is refused or the caller leaves, none stays behind."""
        results: list[Pooled] = []
        streams: deque[RequestStream] = deque()
        try:
            for prompt in prompts:
                if len(streams) >= _WINDOW:
                    results.append(await self._result(streams))
                streams.append(await self._submit(prompt, params))
            while streams:
                results.append(await self._result(streams))
        finally:
            for stream in streams:
                await stream.aclose()
        return results

    async def _submit(self, prompt: PairTokens, params: PoolingParams) -> RequestStream:
        body, generation = self._body, self._generation
        if prompt.second_start is not None:
            params = msgspec.structs.replace(params, second_text_start=prompt.second_start)
        options = RequestOptions(
            priority=body.priority, cache_salt=body.cache_salt, arrival_time=generation.arrival_time
        )
        request_id = f"{generation.response_id}-{self._num_submitted}"
        self._num_submitted += 1
        return await generation.services.llm.add_pooling_request(prompt.token_ids, params, request_id, options=options)

    async def _result(self, streams: deque[RequestStream]) -> Pooled:
        """Wait for the oldest of the streams; it leaves the queue when it is over."""
        output = await final_output(streams[0])
        streams.popleft()
        self._generation.finish_word(output.outputs[0])
        if output.pooled is None:
            raise RequestFailed("the request ended without a result", cause="model_error")
        return Pooled(output.pooled, len(output.prompt_token_ids))


def pooling_usage(results: Sequence[Pooled]) -> dict[str, object]:
    """Count the tokens of all prompts; nothing was generated."""
    total = sum(result.num_prompt_tokens for result in results)
    return {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}


def json_reply(generation: Generation, fields: dict[str, object]) -> Response:
    """Give an answer in the shape of an OpenAI list."""
    head = {
        "id": generation.response_id,
        "object": "list",
        "created": generation.created,
        "model": generation.model,
    }
    return Response(msgspec.json.encode(head | fields), media_type="application/json")
