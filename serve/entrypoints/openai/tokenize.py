"""POST /tokenize and /detokenize: what phase 1 makes of a text or a chat, and back."""

from __future__ import annotations

from fastapi import Request

from serve.entrypoints.app_state import AppState
from serve.entrypoints.openai.generation import read_body
from serve.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest, parse_request
from serve.entrypoints.openai.tool_prompt import messages_with_tools
from serve.errors import InvalidRequest
from serve.renderers.renderer import ChatRenderRequest, TokenizeParams


async def tokenize(state: AppState, request: Request) -> dict[str, object]:
    """Give the ids of a prompt; the context length does not limit it, only the body size does."""
    services = state.serving()
    body = parse_request(TokenizeRequest, await read_body(state, request))
    state.check_model(body.model)
    if body.prompt is not None:
        prompt = await services.renderer.render_text(body.prompt, _params(body, special=True))
    else:
        prompt = await services.renderer.render_chat(
            ChatRenderRequest(
                messages=messages_with_tools(
                    services, body.messages or [], body.tools, chat_template=body.chat_template
                ),
                tokenize=_params(body, special=False),
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template=body.chat_template,
                chat_template_kwargs=body.chat_template_kwargs,
            )
        )
    tokens = prompt.token_ids
    return {
        "count": len(tokens),
        "max_model_len": services.llm.max_model_len,
        "tokens": tokens,
        "token_strs": [services.tokenizer.id_to_token(i) for i in tokens] if body.return_token_strs else None,
    }


def _params(body: TokenizeRequest, *, special: bool) -> TokenizeParams:
    sent = body.add_special_tokens
    return TokenizeParams(add_special_tokens=special if sent is None else sent, max_total_tokens=None)


def tokenizer_info(state: AppState) -> dict[str, object]:
    """Describe the tokenizer: its sizes, its named special tokens, and its own chat template."""
    services = state.serving()
    tokenizer = services.tokenizer
    return {
        **tokenizer.special_tokens,
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "model_max_length": services.llm.max_model_len,
        "chat_template": tokenizer.chat_template,
    }


async def detokenize(state: AppState, request: Request) -> dict[str, object]:
    """Give the text of ids, special tokens included."""
    services = state.serving()
    body = parse_request(DetokenizeRequest, await read_body(state, request))
    state.check_model(body.model)
    limit = services.tokenizer.max_token_id
    wrong = next((token_id for token_id in body.tokens if token_id > limit), None)
    if wrong is not None:
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary; ids are 0 to {limit}", param="tokens")
    return {"prompt": await services.renderer.decode(body.tokens, skip_special_tokens=False)}
