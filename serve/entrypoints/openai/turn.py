"""Phases 1 and 11 of 11: one assistant turn, from messages to a submitted prompt, and from hand-overs to its parts.

Chat, Responses and Messages share it; each writes the parts in its own shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

import msgspec

from serve.config import ServerConfig
from serve.engine.outputs import CompletionOutput, OutputStream, PositionLogprobs
from serve.entrypoints.app_state import AppState, Services
from serve.entrypoints.openai.constraints import build_constraint, with_field
from serve.entrypoints.openai.generation import (
    Generation,
    check_max_tokens,
    resolve_max_tokens,
    tokenize_params,
)
from serve.entrypoints.openai.protocol import ChatCompletionRequest
from serve.entrypoints.openai.tool_prompt import messages_with_tools
from serve.entrypoints.openai.tools import NO_TOOLS, ToolUse, plan_tools
from serve.errors import InvalidRequest, RequestFailed
from serve.limits import too_many
from serve.renderers.answer_format import AnswerFormat, AnswerSpec
from serve.renderers.output_events import CallDelta, CallStart, ContentDelta, Event, OutputParser, ReasoningDelta
from serve.renderers.renderer import ChatRenderRequest, RenderedPrompt
from serve.sampling_params import ReasoningBounds, SamplingParams, StructuredOutputs
from serve.wire.frontend import FinishReason

JSON_KINDS: Final = ("json_schema", "json_object")


class TurnDelta(msgspec.Struct, gc=False):
    """What one hand-over holds for one choice.

    events, token_ids and logprobs (one entry per id) may each be empty. finish_reason ("stop", "length", "tool_calls",
    "abort" or "repetition") and stop_reason come with the last delta of a choice.
    """

    index: int
    events: list[Event]
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Call:
    """A whole tool call; arguments is JSON text, cut short when the answer was."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """A whole choice."""

    index: int
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None

    def add(self, delta: TurnDelta) -> None:
        """Take the next delta of this choice."""
        for event in delta.events:
            match event:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case CallStart(_, call_id, name):
                    self.calls.append(Call(call_id, name))
                case CallDelta(index, arguments):
                    self.calls[index].arguments += arguments
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class ChoiceReader:
    """Turns the text of one choice into events, and tells which of its tokens may be shown."""

    def __init__(self, parser: OutputParser | None, answers: AnswerFormat, spec: AnswerSpec, *, hides: bool) -> None:
        """Start a choice; hides drops thoughts and their tokens. Without a parser all text is content."""
        self.has_calls = False
        self.num_reasoning = 0
        self.has_parser = parser is not None
        self._parser = parser
        self._answers = answers
        self._spec = spec
        self._counts = parser is not None and answers.reasoning is not None
        self._hides = hides and self._counts
        self._token_ids: list[int] = []
        self._held: list[PositionLogprobs] = []
        self._is_open = False
        self._openings: dict[int, str] = {}

    def read(self, output: CompletionOutput) -> TurnDelta:
        """Give what is new; finish_reason is left for the turn to word."""
        text, parser = output.text, self._parser
        if parser is None:
            events: list[Event] = [ContentDelta(text)] if text else []
            return TurnDelta(output.index, events, output.token_ids, output.logprobs)
        events = parser.feed(text) if text else []
        is_over = output.finish_reason is not None
        if is_over:
            events += parser.finish(was_cut=output.finish_reason is not FinishReason.STOP)
        if self.has_calls or any(type(event) is CallStart for event in events):
            self.has_calls = True
            events = self._with_whole_openings(events, is_over=is_over)
        delta = TurnDelta(output.index, events, output.token_ids, output.logprobs)
        if self._counts:
            self._token_ids += output.token_ids
            if is_over:
                self.num_reasoning = self._answers.count_reasoning_tokens(self._spec, self._token_ids)
        if self._hides:
            self._hide(delta, is_over=is_over)
        return delta

    def _with_whole_openings(self, events: list[Event], *, is_over: bool) -> list[Event]:
        """Hold the opening of a call's arguments until more than white space follows, and write no arguments as {}."""
        result: list[Event] = []
        for event in events:
            if isinstance(event, CallStart):
                self._openings[event.index] = ""
            elif isinstance(event, CallDelta) and event.index in self._openings:
                text = self._openings.pop(event.index) + event.arguments
                inner = text.strip().removeprefix("{").strip()
                if not inner:
                    self._openings[event.index] = text
                    continue
                event = CallDelta(event.index, "{}" if inner == "}" else text)
            result.append(event)
        if is_over:
            result += [CallDelta(index, text) for index, text in self._openings.items() if text]
        return result

    def _hide(self, delta: TurnDelta, *, is_over: bool) -> None:
        """Take thoughts and their tokens out of a delta; tokens are held until it is known which they are."""
        delta.events = [event for event in delta.events if type(event) is not ReasoningDelta]
        if self._is_open:
            return
        self._held += delta.logprobs or []
        self._is_open = bool(delta.events) or is_over
        cut = len(self._token_ids)
        if self._is_open:
            cut = self._answers.count_reasoning_tokens(self._spec, self._token_ids)
        delta.token_ids = self._token_ids[cut:]
        if delta.logprobs is not None:
            delta.logprobs = self._held[cut:] if self._is_open else []


class Turn:
    """One assistant turn in progress: iterate for its deltas, once per hand-over; not streamed it has one.

    num_generated and num_reasoning count tokens by choice and are final once the choice has finished.
    """

    def __init__(
        self,
        generation: Generation,
        chat: ChatCompletionRequest,
        *,
        prompt: RenderedPrompt,
        stream: OutputStream,
        readers: list[ChoiceReader],
        tool_use: ToolUse,
    ) -> None:
        self.prompt = prompt
        self.n = len(readers)
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self.num_generated = [0] * self.n
        self._generation = generation
        self._stream = stream
        self._readers = readers
        self._tool_use = tool_use
        self._chat = chat
        self._is_streamed = chat.stream
        self._has_ended = False
        self._is_plain = not any(reader.has_parser for reader in readers)

    @property
    def num_reasoning(self) -> list[int]:
        """Tokens of the thoughts by choice, marks included."""
        return [reader.num_reasoning for reader in self._readers]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TurnDelta]:
        try:
            hand_over = await self._stream.__anext__()
            while not (self._is_streamed or hand_over.finished):
                hand_over = await self._stream.__anext__()
        except InvalidRequest as error:
            raise with_field(error, self._chat, self._tool_use) from None
        except StopAsyncIteration:
            if self._is_streamed or self._has_ended:
                raise
            raise RequestFailed("the request ended without an answer", cause="model_error") from None
        self._has_ended = hand_over.finished
        self.num_cached_tokens = hand_over.num_cached_tokens
        if hand_over.prompt_logprobs is not None:
            self.prompt_logprobs = hand_over.prompt_logprobs
        outputs = hand_over.outputs
        if self._is_plain and len(outputs) == 1 and outputs[0].finish_reason is None:
            # The most frequent case by far, without a call more than it needs.
            output = outputs[0]
            self.num_generated[output.index] += len(output.token_ids)
            events: list[Event] = [ContentDelta(output.text)] if output.text else []
            return [TurnDelta(output.index, events, output.token_ids, output.logprobs)]
        return [self._delta(output) for output in outputs]

    def _delta(self, output: CompletionOutput) -> TurnDelta:
        self.num_generated[output.index] += len(output.token_ids)
        reader = self._readers[output.index]
        delta = reader.read(output)
        if output.finish_reason is not None:
            word = self._generation.finish_word(output)
            if word == "stop" and reader.has_calls and self._tool_use.mode != "named":
                word = "tool_calls"
            delta.finish_reason, delta.stop_reason = word, output.stop_reason
            if self._tool_use.mode != "none":
                self._generation.count_tool_parser(is_streamed=self._is_streamed, has_calls=reader.has_calls)
        return delta

    async def aclose(self) -> None:
        """Abort the turn unless it is over. May be called again."""
        await self._stream.aclose()


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """A turn before it is submitted: what would run, and how its text will be read."""

    prompt: RenderedPrompt
    params: SamplingParams
    readers: list[ChoiceReader]
    tool_use: ToolUse


async def open_turn(generation: Generation, chat: ChatCompletionRequest) -> Turn:
    """Check, render and submit a turn; a refusal comes from here or from the first step of the iteration."""
    plan = await plan_turn(generation, chat)
    prompt = plan.prompt
    stream = await generation.submit(prompt.token_ids, plan.params, chat, request_id=generation.response_id)
    return Turn(generation, chat, prompt=prompt, stream=stream, readers=plan.readers, tool_use=plan.tool_use)


async def plan_turn(generation: Generation, chat: ChatCompletionRequest) -> TurnPlan:
    """Check and render a turn, and give what would run."""
    state, services = generation.state, generation.services
    answers = services.answer_format
    requested = chat.max_output_tokens
    check_max_tokens(requested, "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens")
    check_top_logprobs(chat, state.config.engine.model.max_logprobs)
    if chat.n > state.config.limits.max_n:
        # Each choice gets a parser below, so their number is looked at before all other sampling parameters.
        raise too_many(chat.n, state.config.limits.max_n, param="n", what="choices", flag_name="--max-n")
    tool_use = plan_chat_tools(generation, chat)
    constraint = build_constraint(chat, tool_use, state.config.limits)
    if constraint is not None and constraint.kind in JSON_KINDS and tool_use.mode == "auto":
        # The whole answer is JSON then, so that it can hold no call, only text that looks like one.
        tool_use = NO_TOOLS
    prompt = await services.renderer.render_chat(chat_render_request(state, services, chat))
    spec = answer_spec(chat, tool_use, prompt, thinks=thinks(state.config.server, chat))
    parsers = [answers.new_parser(spec) for _ in range(chat.n)]
    total = services.llm.max_model_len
    params = chat.sampling_params(
        services.llm.default_sampling,
        max_tokens=resolve_max_tokens(requested, services.llm.default_sampling, total - len(prompt.token_ids)),
        logprobs=chat.num_logprobs(),
        prompt_logprobs=chat.prompt_logprobs,
    )
    bounds = _reasoning_bounds(answers, spec, chat.thinking_token_budget, is_constrained=constraint is not None)
    params = _with_answer_format(
        params, constraint=constraint, reasoning=bounds, visible=answers.visible_token_ids if any(parsers) else ()
    )
    readers = [ChoiceReader(parser, answers, spec, hides=not chat.include_reasoning) for parser in parsers]
    return TurnPlan(prompt, params, readers, tool_use)


async def collect(turn: Turn) -> list[Answer]:
    """Read a turn to its end and give its choices by index."""
    answers = [Answer(index) for index in range(turn.n)]
    async for deltas in turn:
        for delta in deltas:
            answers[delta.index].add(delta)
    return answers


def plan_chat_tools(generation: Generation, chat: ChatCompletionRequest) -> ToolUse:
    """Give what the model may do with the request's tools."""
    config = generation.state.config
    can_parse = config.server.enable_auto_tool_choice and generation.services.answer_format.tools is not None
    return plan_tools(
        chat.tools,
        chat.tool_choice,
        parallel=chat.parallel_tool_calls,
        can_parse=can_parse,
        limits=config.limits,
    )


def chat_render_request(state: AppState, services: Services, chat: ChatCompletionRequest) -> ChatRenderRequest:
    """Give what the renderer needs of a chat request: its messages, with the tools described if the template cannot."""
    is_excluded = chat.tool_choice == "none" and state.config.server.exclude_tools_when_tool_choice_none
    tools = None if is_excluded else chat.tools
    total = services.llm.max_model_len
    return ChatRenderRequest(
        messages=messages_with_tools(services, chat.messages, tools, chat_template=chat.chat_template),
        tools=tools,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        chat_template=chat.chat_template,
        chat_template_kwargs=chat.chat_template_kwargs,
        documents=chat.documents,
        reasoning_effort=chat.reasoning_effort,
        tokenize=tokenize_params(chat, chat.max_output_tokens, special=chat.add_special_tokens, total=total),
    )


def answer_spec(chat: ChatCompletionRequest, tool_use: ToolUse, prompt: RenderedPrompt, *, thinks: bool) -> AnswerSpec:
    """Give what the text of the answer may hold."""
    assert prompt.text is not None, "chat prompts are rendered from text"
    return AnswerSpec(
        prompt_text=prompt.text,
        tools=tool_use.schemas(),
        forced=tool_use.forced,
        forced_name=tool_use.name,
        max_calls=tool_use.max_calls,
        thinks=thinks,
    )


def thinks(server: ServerConfig, chat: ChatCompletionRequest) -> bool:
    """Tell whether the template was left free to let the model think; two names are in use for switching it off."""
    variables = {**server.default_chat_template_kwargs, **(chat.chat_template_kwargs or {})}
    is_enabled = variables.get("enable_thinking", chat.reasoning_effort != "none")
    return is_enabled is not False and variables.get("thinking") is not False


def check_top_logprobs(chat: ChatCompletionRequest, limit: int) -> None:
    """Refuse more candidates than the operator allows, under the chat API's own name; limit -1 allows all."""
    if limit != -1 and not 0 <= chat.top_logprobs <= limit:
        raise InvalidRequest(
            f"top_logprobs must be between 0 and {limit}, got {chat.top_logprobs}; lower it or start the server with a "
            "larger --max-logprobs",
            param="top_logprobs",
        )


def _reasoning_bounds(
    answers: AnswerFormat, spec: AnswerSpec, budget: int | None, *, is_constrained: bool
) -> ReasoningBounds | None:
    """Give where thinking ends, when the engine has to know: for a constraint that follows it, or for a budget."""
    if budget == -1:
        budget = None
    if budget is not None and answers.reasoning is None:
        raise InvalidRequest(
            "thinking_token_budget needs to know how this model marks its thoughts; start the server with "
            "--reasoning-parser NAME, or leave it out",
            param="thinking_token_budget",
        )
    if budget is None and not is_constrained:
        return None
    return answers.reasoning_bounds(spec, budget=budget)


def _with_answer_format(
    params: SamplingParams,
    *,
    constraint: StructuredOutputs | None,
    reasoning: ReasoningBounds | None,
    visible: tuple[int, ...],
) -> SamplingParams:
    """Give the parameters with what the form of the answer asks of the engine."""
    if constraint is None and reasoning is None and not visible:
        return params
    return msgspec.structs.replace(
        params, structured_outputs=constraint, reasoning=reasoning, visible_token_ids=visible
    )
