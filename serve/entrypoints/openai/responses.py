"""Phase 1 of 11 (from items to a submitted prompt) and Phase 11 of 11 (from deltas to a Response).

POST /v1/responses, plain, streamed and in the background, and what can be done with stored responses later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams

from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import JsonObject, run_while_connected, wait_for_disconnect
from serve.entrypoints.http_errors import ErrorReply, error_reply
from serve.entrypoints.openai.generation import Generation, read_body, start_generation
from serve.entrypoints.openai.protocol import ChatCompletionRequest, parse_request
from serve.entrypoints.openai.responses_input import (
    Item,
    chat_messages,
    new_id,
    read_input,
    turn_starts,
    without_oldest,
)
from serve.entrypoints.openai.responses_output import ResponseObject, echoed_fields, usage_counts
from serve.entrypoints.openai.responses_protocol import DEFAULT_PAGE, MAX_PAGE, ResponsesRequest, own_words
from serve.entrypoints.openai.responses_store import EventLog, StoredResponse
from serve.entrypoints.openai.responses_stream import ResponseWriter
from serve.entrypoints.openai.turn import Turn, chat_render_request, open_turn
from serve.entrypoints.sse import start_stream
from serve.errors import InvalidRequest
from serve.renderers.renderer import TOO_LONG


async def create_response(state: AppState, request: Request) -> Response:
    """Answer POST /v1/responses; refusals come before a stream begins."""
    arrival_time = time.time()
    state.admitting()
    body = parse_request(ResponsesRequest, await read_body(state, request))
    context = _read_context(state, body)
    chat = body.chat_request(chat_messages(context, body.instructions))
    generation = start_generation(state, request, chat, prefix="resp_", arrival_time=arrival_time)
    if generation.response_id in state.responses:
        # The client has used its request id before; two responses with one id could not be told apart.
        generation.response_id = new_id("resp_")
    job = ResponseJob(generation, body, chat, context)
    with own_words():
        if body.background:
            return await _start_background(job, request)
        if body.stream:
            return await start_stream(job.stream(), request.receive, done=b"", error_event=job.error_event)
        answer = await run_while_connected(job.complete(), wait_for_disconnect(request.receive))
    return Response(answer, media_type="application/json")


def _read_context(state: AppState, body: ResponsesRequest) -> list[Item]:
    """Give the conversation up to the answer: what the request goes on from, then its own input."""
    earlier: list[Item] = []
    if body.previous_response_id is not None:
        previous = state.responses.get(body.previous_response_id, param="previous_response_id")
        if previous.is_running:
            raise InvalidRequest(
                "previous_response_id names a response that is still running; wait until it has ended",
                param="previous_response_id",
            )
        earlier = previous.conversation()
    return earlier + read_input(body.input, state.responses.find_item)


class ResponseJob:
    """One Response in the making. stream(), complete() and run() each take it to its end; use one of them."""

    def __init__(
        self, generation: Generation, body: ResponsesRequest, chat: ChatCompletionRequest, context: list[Item]
    ) -> None:
        self.generation = generation
        self.body = body
        self._chat = chat
        self._store = generation.state.responses
        params = chat.sampling_params(
            generation.services.llm.default_sampling, max_tokens=1, logprobs=None, prompt_logprobs=None
        )
        response = ResponseObject(
            generation.response_id,
            generation.model,
            generation.created,
            echoed_fields(body, temperature=params.temperature, top_p=params.top_p),
            status="queued" if body.background else "in_progress",
        )
        self.record = StoredResponse(response, context if body.store else ())
        as_ids = chat.return_tokens_as_token_ids
        self.writer = ResponseWriter(
            response,
            top_logprobs=chat.num_logprobs(),
            as_ids=generation.state.config.server.return_tokens_as_token_ids if as_ids is None else as_ids,
        )

    async def open(self) -> Turn:
        """Submit the prompt; with truncation auto the oldest turns of the conversation go until it fits."""
        if self.body.truncation == "auto":
            await self._shorten()
        return await open_turn(self.generation, self._chat)

    async def _shorten(self) -> None:
        if await self._fits():
            return
        messages = self._chat.messages
        starts = turn_starts(messages)
        low, high = 0, len(starts)
        while low < high:
            middle = (low + high) // 2
            self._chat.messages = without_oldest(messages, starts[middle])
            low, high = (low, middle) if await self._fits() else (middle + 1, high)
        if starts:
            self._chat.messages = without_oldest(messages, starts[min(low, len(starts) - 1)])
        if low == len(starts):
            # Even the last turn is too long: its end is what the user asks.
            self._chat.truncate_prompt_tokens = -1

    async def _fits(self) -> bool:
        state, services = self.generation.state, self.generation.services
        try:
            await services.renderer.render_chat(chat_render_request(state, services, self._chat))
        except InvalidRequest as error:
            if error.code != TOO_LONG:
                raise
            return False
        return True

    async def complete(self) -> bytes:
        """Give the body of a plain answer."""
        turn = await self.open()
        try:
            async for deltas in turn:
                # Hidden thoughts have taken their tokens with them.
                num_reasoning = turn.num_reasoning[0] if self._chat.include_reasoning else 0
                self.writer.feed(deltas[0], num_reasoning=num_reasoning)
        finally:
            await turn.aclose()
        self.writer.close(self._usage(turn))
        return self._settle()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Give one block of events per hand-over; closing the generator aborts the request."""
        turn = await self.open()
        is_first = True
        try:
            async for deltas in turn:
                if is_first:
                    self.writer.open()
                    is_first = False
                self.writer.feed(deltas[0])
                block = b"".join(self.writer.take())
                if block:
                    yield block
        finally:
            await turn.aclose()
        self.writer.close(self._usage(turn))
        self._settle()
        yield b"".join(self.writer.take())

    async def run(self, turn: Turn) -> None:
        """Take a background response to the end of its turn; finish() writes what comes then."""
        try:
            with own_words():
                async for deltas in turn:
                    self.writer.start()
                    self.writer.feed(deltas[0])
                    self.log_events()
        finally:
            await turn.aclose()
        self.writer.close(self._usage(turn))

    def finish(self, task: asyncio.Task[None]) -> None:
        """Write the end of a background response, whatever ended its task."""
        if task.cancelled():
            self.writer.cancel()
        elif (error := task.exception()) is not None:
            self.writer.fail(error_reply(error, self.generation.response_id))
        self.log_events(is_last=True)
        self._store.settle(self.record)

    def error_event(self, reply: ErrorReply) -> bytes:
        """Give the last events of a stream that fails."""
        if self.writer.is_over:
            return b""
        self.writer.fail(reply)
        self._settle()
        return b"".join(self.writer.take())

    def log_events(self, *, is_last: bool = False) -> None:
        """Keep the events so far for those who follow a background response, if it is streamed."""
        events = self.writer.take()
        if self.record.events is not None:
            self.record.events.add(events, is_last=is_last)

    def _settle(self) -> bytes:
        """Keep the finished response unless it was not to be kept, and give its body."""
        if self.body.store:
            self._store.settle(self.record)
        return self.record.body()

    def _usage(self, turn: Turn) -> JsonObject:
        """Give the counts; every whole block of a prompt goes into the prefix cache unless it came from there."""
        state = self.generation.state
        num_prompt, cached, written = len(turn.prompt.token_ids), turn.num_cached_tokens, 0
        block_size = self.generation.services.ready.block_size
        if state.config.engine.cache.enable_prefix_caching:
            written = max(0, num_prompt - num_prompt % block_size - cached)
        is_shown = state.config.server.enable_prompt_tokens_details
        return usage_counts(
            num_prompt,
            turn.num_generated[0],
            cached=cached if is_shown else 0,
            written=written if is_shown else 0,
            reasoning=turn.num_reasoning[0],
        )


async def _start_background(job: ResponseJob, request: Request) -> Response:
    """Submit, then answer at once or stream from the log of events; the answer goes on without its client."""
    store = job.generation.state.responses
    store.check_room()
    turn = await run_while_connected(job.open(), wait_for_disconnect(request.receive))
    record = job.record
    record.is_background = True
    record.events = EventLog() if job.body.stream else None
    store.add_running(record)
    job.writer.open()
    job.log_events()
    answer = record.body()
    record.task = asyncio.create_task(job.run(turn))
    record.task.add_done_callback(job.finish)
    # A task that is cancelled before it has begun would not close its turn.
    await asyncio.sleep(0)
    if record.events is not None:
        return await start_stream(record.events.read(0), request.receive, done=b"")
    return Response(answer, media_type="application/json")


async def get_response(state: AppState, response_id: str, request: Request) -> Response:
    """Answer GET /v1/responses/{id}; with stream=true the events from starting_after on."""
    record = state.responses.get(response_id)
    query = request.query_params
    if query.get("stream", "false").lower() not in ("true", "1"):
        return Response(record.body(), media_type="application/json")
    if record.events is None:
        raise InvalidRequest(
            "only a response created with background: true and stream: true can be streamed again", param="stream"
        )
    start = _whole_number(query, "starting_after", default=-1, lowest=-1, highest=2**31) + 1
    return await start_stream(record.events.read(start), request.receive, done=b"")


async def cancel_response(state: AppState, response_id: str) -> bytes:
    """Answer POST /v1/responses/{id}/cancel; one that has ended stays as it is."""
    record = state.responses.get(response_id)
    if not record.is_background:
        raise InvalidRequest("only a response created with background: true can be cancelled", param="response_id")
    await _stop(record)
    return record.body()


async def delete_response(state: AppState, response_id: str) -> JsonObject:
    """Answer DELETE /v1/responses/{id}; one that runs is stopped first."""
    record = state.responses.get(response_id)
    await _stop(record)
    if response_id in state.responses:
        state.responses.remove(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


async def _stop(record: StoredResponse) -> None:
    if record.task is not None:
        record.task.cancel()
        await record.has_ended.wait()


def list_input_items(state: AppState, response_id: str, query: QueryParams) -> JsonObject:
    """Answer GET /v1/responses/{id}/input_items: one page of what led to the response, the newest item first."""
    items = state.responses.get(response_id).context()
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {order[:40]!r}", param="order")
    limit = _whole_number(query, "limit", default=DEFAULT_PAGE, lowest=1, highest=MAX_PAGE)
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        place = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest(f"after names no item of this response: {after[:80]!r}", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


def _whole_number(query: QueryParams, name: str, *, default: int, lowest: int, highest: int) -> int:
    sent = query.get(name)
    if sent is None:
        return default
    digits = sent.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and lowest <= int(sent) <= highest):
        raise InvalidRequest(f"{name} must be a whole number from {lowest} to {highest}", param=name)
    return int(sent)
