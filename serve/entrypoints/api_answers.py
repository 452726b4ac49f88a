"""The bodies of answers as /openapi.json describes them, field by field; the handlers do not make them with these.

A field that has a default may be absent. Every model forbids other fields, so a test that reads the description finds
what is not described.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, RootModel

Finish = Literal["stop", "length", "tool_calls", "abort", "repetition"]


class Answer(BaseModel):
    """What all parts of answers share."""

    model_config = ConfigDict(extra="forbid")


class CachedTokens(Answer):
    """Tokens of the prompt that came from the prefix cache."""

    cached_tokens: int


class ReasoningTokens(Answer):
    """Tokens of the answer that were thoughts."""

    reasoning_tokens: int


class Usage(Answer):
    """Tokens that the model read and wrote, over all choices; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None


class PromptLogprob(Answer):
    """One candidate at one place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


# Under another name than the type's: a field may be called object.
JsonObject = dict[str, object]
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(Answer):
    """The function of a call; arguments is JSON text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """One call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """The message of a choice; content is null beside calls, or when nothing but thoughts came."""

    role: str
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class TokenLogprob(Answer):
    """One token, its log-probability, and its own bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(Answer):
    """One token of the answer with its best alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """One entry per token of the answer."""

    content: list[TokenLogprobs]


class ChatChoice(Answer):
    """One answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class BatchChoice(Answer):
    """The answer to one conversation of many."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletion(Answer):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class CompletionLogprobs(Answer):
    """Four lists, one entry per token of the returned text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class Completion(Answer):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str


class Tokens(Answer):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    """Answer of POST /detokenize."""

    prompt: str


class Model(Answer):
    """One name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[str]


class Models(Answer):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Alive(Answer):
    """Answer of GET /live."""

    status: Literal["alive"]
    phase: str
    is_ready: bool


class Version(Answer):
    """Answer of GET /version."""

    version: str


class Load(Answer):
    """Answer of GET /load."""

    server_load: int


class ThinkingTokens(Answer):
    """Tokens of an answer that were thoughts."""

    thinking_tokens: int


class MessageUsage(Answer):
    """Tokens that the model read and wrote, with the names of the Messages API."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: ThinkingTokens


class TextBlock(Answer):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """Thoughts, with the mark that clients send back."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Answer):
    """A call that the model asks for."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]


class Message(Answer):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(Answer):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class RenderedRequest(Answer):
    """What one prompt would run; a body for POST /inference/v1/generate."""

    request_id: str
    model: str
    token_ids: list[int]
    prompt: str | None
    sampling_params: dict[str, object]
    stream: bool
    cache_salt: str | None
    priority: int


class RenderedRequests(RootModel[list[RenderedRequest]]):
    """Answer of POST /v1/completions/render, in the order of the prompts."""


class GeneratedChoice(Answer):
    """One continuation in token ids."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: int | str | None
    token_ids: list[int]


class Generated(Answer):
    """Answer of POST /inference/v1/generate."""

    request_id: str
    choices: list[GeneratedChoice]
    prompt_logprobs: PromptLogprobs | None
    kv_transfer_params: None
    usage: Usage


class ResponseInputTokens(Answer):
    """Where the tokens of a prompt came from and went."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Answer):
    """Tokens that the model read and wrote for a Response."""

    input_tokens: int
    input_tokens_details: ResponseInputTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(Answer):
    """Why a Response failed."""

    code: str
    message: str


class ResponseObject(Answer):
    """Answer of POST /v1/responses: what came of the request, and then the parameters it was made with."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[JsonObject]
    usage: ResponseUsage | None
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    tools: list[JsonObject]
    tool_choice: str | JsonObject
    parallel_tool_calls: bool
    text: JsonObject
    reasoning: JsonObject
    truncation: Literal["auto", "disabled"]
    background: bool
    store: bool
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    service_tier: str


class DeletedResponse(Answer):
    """Answer of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemPage(Answer):
    """Answer of GET /v1/responses/{response_id}/input_items."""

    object: Literal["list"]
    data: list[JsonObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ChatBatch(Answer):
    """Answer of POST /v1/chat/completions/batch: one choice for each conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[BatchChoice]
    usage: Usage
    system_fingerprint: str


class PoolingUsage(Answer):
    """Tokens that a pooling model read."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0]


class Embedding(Answer):
    """One vector: numbers, or base64 of their bytes."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class Embeddings(Answer):
    """Answer of POST /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class PooledEntry(Answer):
    """What the model made of one input: a vector, a vector per token, or base64 of their bytes."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PooledEntries(Answer):
    """Answer of POST /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledEntry]
    usage: PoolingUsage


class Classification(Answer):
    """The probabilities of all classes for one input, and the likeliest class."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Classifications(Answer):
    """Answer of POST /classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


class Score(Answer):
    """How well one pair fits."""

    index: int
    object: Literal["score"]
    score: float


class Scores(Answer):
    """Answer of POST /score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedText(Answer):
    """The text of a document."""

    text: str


class RankedDocument(Answer):
    """One document and how well it answers; index is its place in the request."""

    index: int
    document: RankedText
    relevance_score: float


class Ranking(Answer):
    """Answer of POST /rerank, best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]


class Status(Answer):
    """Answer of POST /pause and /resume."""

    status: Literal["paused", "resumed"]


class Paused(Answer):
    """Answer of GET /is_paused."""

    is_paused: bool


class Success(Answer):
    """Answer of POST /reset_prefix_cache."""

    success: bool
