"""Phase 1 of 11: turns chat messages or text into the token ids of a prompt, in a thread pool off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from serve.errors import ConfigError, InvalidRequest
from serve.renderers.chat_template import ChatTemplate, TemplateCache, resolve_template
from serve.renderers.messages import ChatMessage, ContentFormat, content_chars, count_chars, normalize_messages
from serve.renderers.pairs import PairTokens, encode_pair
from serve.renderers.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TOO_LONG: Final = "context_length_exceeded"
RESERVED_KWARGS: Final = ("messages", "tools", "tokenize", "conversation", "chat_template")
# A render may write this many times the characters of its input and of the context in tokens.
_MAX_GROWTH: Final = 4
# Marks the end of the message to continue. The blank tells whether the template strips its messages.
_CONTINUE_TAG: Final = "<<end-of-message-to-continue>> "
_TRUNCATION_SLACK_TOKENS: Final = 64

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TokenizeParams:
    """Length rules of one prompt.

    max_total_tokens is the context length, None for no limit. max_output_tokens is what the request asks for, 0 when
    it does not. truncate_prompt_tokens: -1 means as many as fit; truncation_side "right" keeps the first ids, "left"
    and None keep the last.
    """

    add_special_tokens: bool
    max_total_tokens: int | None
    max_output_tokens: int = 0
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


@dataclass(slots=True)
class ChatRenderRequest:
    """What a chat request says about its prompt. Fields that are None were not sent."""

    messages: list[dict[str, object]]
    tokenize: TokenizeParams
    tools: list[dict[str, object]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    documents: list[dict[str, object]] | None = None
    reasoning_effort: str | None = None


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt ready for the engine; text is None for prompts given as ids."""

    token_ids: list[int]
    text: str | None


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """The operator's choices about chat templates; chat_template is Jinja text or a name, not a path."""

    chat_template: str | None = None
    content_format: str = "auto"
    default_kwargs: Mapping[str, object] = field(default_factory=dict)
    trust_request_template: bool = False
    response_role: str = "assistant"


def input_limit(params: TokenizeParams) -> int | None:
    """Give the most prompt tokens the parameters allow, None for no limit. Raises InvalidRequest when they clash."""
    total, output, keep = params.max_total_tokens, params.max_output_tokens, params.truncate_prompt_tokens
    if total is not None and output > total:
        raise InvalidRequest(
            f"max_tokens={output} exceeds the context length max_model_len={total}; lower max_tokens",
            param="max_tokens",
            code=TOO_LONG,
        )
    limit = None if total is None else total - output
    if keep is not None and (keep == 0 or keep < -1):
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or at least 1, got {keep}", param="truncate_prompt_tokens"
        )
    if keep is not None and limit is not None and keep > limit:
        raise InvalidRequest(
            f"truncate_prompt_tokens={keep} exceeds the {limit} prompt tokens that max_model_len={total} and "
            f"max_tokens={output} leave; lower one of them",
            param="truncate_prompt_tokens",
        )
    if params.truncation_side not in (None, "left", "right"):
        raise InvalidRequest("truncation_side must be left or right", param="truncation_side")
    return limit


class ChatRenderer:
    """Renders, tokenizes and decodes in num_workers threads; the event loop only waits.

    All refusals are InvalidRequest. A render stops itself after 5 s (chat_template.py), so no thread is ever lost.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, max_model_len: int, settings: TemplateSettings, num_workers: int = 1
    ) -> None:
        reserved = [name for name in RESERVED_KWARGS if name in settings.default_kwargs]
        if reserved:
            raise ConfigError(f"--default-chat-template-kwargs may not set {', '.join(reserved)}")
        self.response_role = settings.response_role
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._settings = settings
        self._templates = TemplateCache()
        self._has_logged_format = False
        self._check_given_template()
        self._pool = ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="renderer")

    async def render_chat(self, request: ChatRenderRequest) -> RenderedPrompt:
        """Give the prompt of chat messages; the text goes through the same tokenizer call as a completion's."""
        self._check_kwargs(request)
        limit = input_limit(request.tokenize)
        self._check_chars(
            content_chars(request.messages),
            limit,
            request.tokenize,
            "messages",
        )

        def run() -> RenderedPrompt:
            text = self._render(request)
            return self._tokenize(text, request.tokenize, "messages")

        return await self._run(run)

    def template_text(self, given: str | None = None, *, has_tools: bool) -> str | None:
        """Give the text of the template that a chat would be rendered with, None when there is none."""
        if given is None or not self._settings.trust_request_template:
            given = self._settings.chat_template
        try:
            return resolve_template(given, self._tokenizer.chat_template, has_tools=has_tools)
        except InvalidRequest:
            return None

    async def render_text(self, text: str, params: TokenizeParams) -> RenderedPrompt:
        """Give the prompt of a text."""
        self._check_chars(len(text), input_limit(params), params, "prompt")
        return await self._run(lambda: self._tokenize(text, params, "prompt"))

    async def render_texts(self, texts: tuple[str, ...], params: TokenizeParams) -> PairTokens:
        """Give the prompt of one text or of two for a pooling model; cut texts keep the special tokens around them."""
        limit = input_limit(params)
        keep = limit if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
        side = params.truncation_side or "right"
        if keep is not None:
            texts = tuple(self._trim(text, keep, side) for text in texts)
        elif limit is not None:
            # Text that cannot fit whatever its tokens are is not tokenized.
            at_least = sum(map(len, texts)) // self._tokenizer.max_chars_per_token
            if at_least > limit:
                raise _too_long_input(f"at least {at_least}", limit)

        def run() -> PairTokens:
            encoded = encode_pair(
                self._tokenizer, texts, add_special_tokens=params.add_special_tokens, keep=keep, side=side
            )
            if limit is not None and len(encoded.token_ids) > limit:
                raise _too_long_input(str(len(encoded.token_ids)), limit)
            return encoded

        return await self._run(run)

    def check_token_ids(self, token_ids: list[int], params: TokenizeParams) -> RenderedPrompt:
        """Apply truncation and length rules to a prompt given as ids."""
        return RenderedPrompt(_fit(token_ids, params, "prompt", is_cut=False), None)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Give the text of token ids."""
        return await self._run(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    async def warm_up(self) -> None:
        """Compile the template and run the tokenizer once, so that the first request does not pay for it."""
        params = TokenizeParams(add_special_tokens=False, max_total_tokens=None)
        try:
            await self.render_chat(ChatRenderRequest([{"role": "user", "content": "warm-up"}], params))
        except InvalidRequest as error:
            log.info("chat is not available or refuses a one-message chat: %s", error)
            await self.render_text("warm-up", params)

    def close(self) -> None:
        """Stop taking work; queued work is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_given_template(self) -> None:
        """Refuse at start what --chat-template gives, when it is no template."""
        given = self._settings.chat_template
        if given is not None:
            try:
                self._templates.get(resolve_template(given, self._tokenizer.chat_template, has_tools=False))
            except InvalidRequest as error:
                raise ConfigError(f"--chat-template: {error}") from None

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _check_kwargs(self, request: ChatRenderRequest) -> None:
        kwargs = request.chat_template_kwargs or {}
        is_given = request.chat_template is not None or "chat_template" in kwargs
        if is_given and not self._settings.trust_request_template:
            raise InvalidRequest(
                "chat_template is not accepted in requests; the operator can allow it with "
                "--trust-request-chat-template",
                param="chat_template",
            )
        for name in RESERVED_KWARGS:
            if name in kwargs:
                raise InvalidRequest(
                    f"chat_template_kwargs may not set {name}; use the request field of that name if there is one",
                    param=f"chat_template_kwargs.{name}",
                )

    def _render(self, request: ChatRenderRequest) -> str:
        given = request.chat_template if request.chat_template is not None else self._settings.chat_template
        text = resolve_template(given, self._tokenizer.chat_template, has_tools=bool(request.tools))
        template = self._templates.get(text)
        messages = normalize_messages(
            request.messages,
            self._content_format(template),
            knows_developer="developer" in text,
            knows_null_content=template.knows_null_content,
            wants_text_arguments=template.wants_text_arguments,
        )
        final_text = None
        if request.continue_final_message:
            if request.add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message needs add_generation_prompt false: one leaves the last message open, the "
                    "other begins a new one",
                    param="continue_final_message",
                )
            final_text = _tag_final_message(messages)
        variables = self._variables(request, messages)
        max_chars = _MAX_GROWTH * (self._max_model_len + count_chars([messages, request.tools, request.documents]))
        rendered = template.render(variables, max_chars=max_chars)
        return rendered if final_text is None else _cut_at_tag(rendered, final_text)

    def _content_format(self, template: ChatTemplate) -> ContentFormat:
        asked = self._settings.content_format
        chosen: ContentFormat = (
            "string" if asked == "string" else "openai" if asked == "openai" else template.content_format
        )
        if not self._has_logged_format:
            self._has_logged_format = True
            log.info("chat template content format: %s (detected: %s)", chosen, template.content_format)
            if chosen != template.content_format:
                log.warning("--chat-template-content-format %s differs from what the template seems to want", asked)
        return chosen

    def _variables(self, request: ChatRenderRequest, messages: list[ChatMessage]) -> dict[str, object]:
        """Give the template's variables; later sources win: model, operator, request kwargs, request fields."""
        variables: dict[str, object] = {
            **self._tokenizer.special_tokens,
            **self._settings.default_kwargs,
            **(request.chat_template_kwargs or {}),
            "messages": messages,
            "tools": request.tools or None,
            "add_generation_prompt": request.add_generation_prompt,
        }
        variables["documents"] = request.documents if request.documents is not None else variables.get("documents")
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
            variables.setdefault("enable_thinking", request.reasoning_effort != "none")
        return variables

    def _check_chars(self, num_chars: int, limit: int | None, params: TokenizeParams, param: str) -> None:
        """Refuse text that cannot fit whatever its tokens are, without tokenizing it."""
        if limit is None or params.truncate_prompt_tokens is not None:
            return
        if num_chars > limit * self._tokenizer.max_chars_per_token:
            at_least = num_chars // self._tokenizer.max_chars_per_token
            raise _too_long(at_least, params, param, is_exact=False)

    def _tokenize(self, text: str, params: TokenizeParams, param: str) -> RenderedPrompt:
        limit = input_limit(params)
        keep = limit if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
        source, max_length = text, None
        if keep is not None:
            source = self._trim(text, keep, params.truncation_side)
        elif params.max_total_tokens is not None:
            self._check_chars(len(text), limit, params, param)
            max_length = params.max_total_tokens + 1
        token_ids = self._tokenizer.encode(source, add_special_tokens=params.add_special_tokens, max_length=max_length)
        return RenderedPrompt(_fit(token_ids, params, param, is_cut=len(token_ids) == max_length), text)

    def _trim(self, text: str, keep: int, side: str | None) -> str:
        """Cut off text that cannot reach the kept tokens, on the side that is dropped."""
        num_chars = (keep + _TRUNCATION_SLACK_TOKENS) * self._tokenizer.max_chars_per_token
        if len(text) <= num_chars:
            return text
        return text[:num_chars] if side == "right" else text[-num_chars:]


def _fit(token_ids: list[int], params: TokenizeParams, param: str, *, is_cut: bool) -> list[int]:
    """Truncate as asked, then check the length; is_cut says that there are more ids than these."""
    limit = input_limit(params)
    keep = limit if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
    if keep is not None and len(token_ids) > keep:
        token_ids = token_ids[:keep] if params.truncation_side == "right" else token_ids[len(token_ids) - keep :]
    if limit is not None and len(token_ids) > limit:
        raise _too_long(len(token_ids), params, param, is_exact=not is_cut)
    return token_ids


def _too_long(num_tokens: int, params: TokenizeParams, param: str, *, is_exact: bool) -> InvalidRequest:
    total, output = params.max_total_tokens or 0, params.max_output_tokens
    count = f"{'' if is_exact else 'at least '}{num_tokens}"
    if is_exact and num_tokens < total:
        message = (
            f"max_tokens={output} with a prompt of {count} tokens makes {num_tokens + output}, over the context length "
            f"max_model_len={total}; lower max_tokens to at most {total - num_tokens} or shorten the prompt"
        )
    else:
        message = (
            f"the prompt of {count} tokens with max_tokens={output} exceeds the context length max_model_len={total}; "
            "shorten the prompt or set truncate_prompt_tokens"
        )
    return InvalidRequest(message, param=param, code=TOO_LONG)


def _too_long_input(count: str, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"the input of {count} tokens exceeds the {limit} tokens that the model takes (max_model_len); shorten it or "
        "set truncate_prompt_tokens",
        param="input",
        code=TOO_LONG,
    )


def _tag_final_message(messages: list[ChatMessage]) -> str:
    """Mark the end of the last message's text and give that text."""
    final = messages[-1]
    content = final.get("content")
    where = f"messages.{len(messages) - 1}.content"
    if isinstance(content, str) and content:
        final["content"] = content + _CONTINUE_TAG
        return content
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        text = str(content[-1].get("text", ""))
        final["content"] = [*content[:-1], {**content[-1], "text": text + _CONTINUE_TAG}]
        return text
    raise InvalidRequest("continue_final_message needs a last message with text", param=where)


def _cut_at_tag(rendered: str, final_text: str) -> str:
    """Cut a rendered chat where the marked message ends; as transformers does, also when the template strips."""
    at = rendered.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final_text.strip() not in rendered:
        raise InvalidRequest(
            "continue_final_message does not work with this chat template: it drops or changes the last message",
            param="continue_final_message",
        )
    is_kept_as_sent = rendered.startswith(_CONTINUE_TAG, at)
    return rendered[:at] if is_kept_as_sent else rendered[:at].rstrip()
