"""What a program hands to LLM, read into what the engine client takes: prompts, conversations, parameters."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, SupportsIndex, TypeGuard, cast

import msgspec
import numpy as np

from serve.engine.prompt_embeds import EmbeddedPrompt, decode_prompt_embeds, embedded_prompt
from serve.entrypoints.openai.constraints import build_constraint
from serve.entrypoints.openai.protocol import GenerationRequest, parse_request
from serve.entrypoints.openai.tools import NO_TOOLS
from serve.errors import InvalidRequest
from serve.limits import RequestLimits
from serve.sampling_params import OutputKind, SamplingParams, StructuredOutputs

Prompt = str | Sequence[int] | Mapping[str, object]
Conversation = Sequence[Mapping[str, object]]

_PROMPT_FORMS: Final = (
    "a prompt is a text or a list of token ids, which are whole numbers, or a dict with exactly one of prompt (text), "
    "prompt_token_ids and prompt_embeds"
)
_CHAT_FORMS: Final = 'messages is a list of {"role": ..., "content": ...}, or a list of such lists'
_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids", "prompt_embeds")
_SALT: Final = "cache_salt"
_FIELDS_BY_KIND: Final = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
# How msgspec names the place of a wrong value in parameters, which it sees as an array.
_PLACE: Final = re.compile(r" - at `\$\[(\d+)\]([^`]*)`")


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One prompt as it was given. cache_salt keeps its cached blocks apart from those of other salts."""

    content: str | list[int] | EmbeddedPrompt
    cache_salt: str | None = None


def list_prompts(prompts: object) -> list[object]:
    """Give one prompt or several as a list; each is still to be read."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not _is_list(prompts):
        raise InvalidRequest(f"{_PROMPT_FORMS}; got {_shown(prompts)}")
    return [prompts] if len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)) else list(prompts)


def read_prompt(prompt: object, embeds_size: int | None) -> GivenPrompt:
    """Give a prompt in the form that the engine client takes. Raises InvalidRequest.

    embeds_size is the number of elements of one embedding, None when embedded prompts are not taken.
    """
    if not isinstance(prompt, Mapping):
        return GivenPrompt(prompt if isinstance(prompt, str) else _read_ids(prompt))
    given = [key for key, value in prompt.items() if key != _SALT and value is not None]
    if len(given) != 1 or given[0] not in _PROMPT_KEYS:
        raise InvalidRequest(f"{_PROMPT_FORMS}; got {', '.join(map(repr, given)) or 'none of them'}")
    salt = prompt.get(_SALT)
    if salt is not None and not isinstance(salt, str):
        raise InvalidRequest(f"{_SALT} must be a text, got {_shown(salt)}", param=_SALT)
    value = prompt[given[0]]
    if given[0] == "prompt_embeds":
        return GivenPrompt(_read_embeds(value, embeds_size), salt)
    if given[0] == "prompt_token_ids":
        return GivenPrompt(_read_ids(value), salt)
    if not isinstance(value, str):
        raise InvalidRequest(f"prompt must be a text, got {_shown(value)}; ids go in prompt_token_ids", param="prompt")
    return GivenPrompt(value, salt)


def _read_ids(value: object) -> list[int]:
    """Give token ids as plain integers, whatever kind of integer they are: the engine core takes no other."""
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not _is_list(items):
        raise InvalidRequest(f"{_PROMPT_FORMS}; got {_shown(value)}")
    try:
        return [int(operator.index(cast(SupportsIndex, token_id))) for token_id in items]
    except TypeError:
        raise InvalidRequest(f"{_PROMPT_FORMS}; got a list that holds something else") from None


def _read_embeds(value: object, embeds_size: int | None) -> EmbeddedPrompt:
    """Give rows of any kind of array, or of one of the forms that requests over HTTP use."""
    name = "prompt_embeds"
    if embeds_size is None:
        raise InvalidRequest(
            f"{name} is not accepted: a model that generates takes it, in an LLM made with enable_prompt_embeds=True",
            param=name,
        )
    if isinstance(value, (str, Mapping)):
        return decode_prompt_embeds(value, embeds_size, param=name)
    try:
        rows = np.ascontiguousarray(np.asarray(value, dtype=np.float32))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"{name} is no array of float32: {error}", param=name) from None
    return embedded_prompt(rows, embeds_size, param=name)


def list_conversations(messages: object) -> list[object]:
    """Give one conversation or several as a list; each is still to be read."""
    if not _is_list(messages):
        raise InvalidRequest(f"{_CHAT_FORMS}; got {_shown(messages)}", param="messages")
    return [messages] if len(messages) > 0 and isinstance(messages[0], Mapping) else list(messages)


def read_conversation(messages: object) -> list[dict[str, object]]:
    """Give the messages of one conversation. Raises InvalidRequest."""
    if not _is_list(messages):
        raise InvalidRequest(f"{_CHAT_FORMS}; got {_shown(messages)}", param="messages")
    read: list[dict[str, object]] = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{_CHAT_FORMS}; one message is {_shown(message)}", param="messages")
        read.append(dict(message))
    return read


def read_params(params: object, limits: RequestLimits) -> SamplingParams:
    """Give parameters as they go to the engine: types checked, lists as tuples, one hand-over at the end."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"sampling_params must be one SamplingParams, or a list with one for each prompt; got {_shown(params)}"
        )
    if isinstance(params.stop, str):
        params = msgspec.structs.replace(params, stop=(params.stop,))
    if params.structured_outputs is not None:
        constraint = _read_constraint(params.structured_outputs, limits)
        params = msgspec.structs.replace(params, structured_outputs=constraint)
    try:
        checked = msgspec.convert(msgspec.to_builtins(params), SamplingParams)
    except msgspec.ValidationError as error:
        raise _named(error) from None
    except TypeError as error:
        raise InvalidRequest(f"sampling_params has a value of the wrong type: {error}") from None
    return msgspec.structs.replace(checked, output_kind=OutputKind.FINAL_ONLY)


def _read_constraint(given: object, limits: RequestLimits) -> StructuredOutputs | None:
    """Give a constraint that keeps to the rules of a request over HTTP; StructuredOutputs or a dict."""
    sent = _as_sent(given) if isinstance(given, StructuredOutputs) else given
    if not isinstance(sent, Mapping):
        raise InvalidRequest(
            'structured_outputs must be StructuredOutputs or a dict such as {"regex": "[0-9]+"}; got ' + _shown(sent),
            param="structured_outputs",
        )
    try:
        request = parse_request(GenerationRequest, {"structured_outputs": dict(sent)})
        return build_constraint(request, NO_TOOLS, limits)
    except TypeError as error:
        raise InvalidRequest(
            f"structured_outputs holds what JSON cannot: {error}", param="structured_outputs"
        ) from None


def _as_sent(given: StructuredOutputs) -> dict[str, object]:
    """Give the object that a request would ask for the same constraint with."""
    name = _FIELDS_BY_KIND.get(given.kind)
    if name is None:
        raise InvalidRequest(
            f"StructuredOutputs kind must be one of {', '.join(_FIELDS_BY_KIND)}, got {given.kind!r}",
            param="structured_outputs",
        )
    spec: object = given.spec
    if name == "json_object":
        spec = True
    elif name == "choice" and isinstance(spec, str):
        try:
            spec = json.loads(spec)
        except ValueError as error:
            raise InvalidRequest(
                f"StructuredOutputs of kind choice needs a JSON list as its spec: {error}", param="structured_outputs"
            ) from None
    return {
        name: spec,
        "whitespace_pattern": given.whitespace_pattern,
        "disable_any_whitespace": given.disable_any_whitespace,
        "disable_additional_properties": given.disable_additional_properties,
    }


def _named(error: msgspec.ValidationError) -> InvalidRequest:
    """Give the refusal of a wrong type with the name of the parameter instead of its place."""
    text = str(error)
    place = _PLACE.search(text)
    if place is None:
        return InvalidRequest(f"sampling_params has a value of the wrong type: {text}")
    name = SamplingParams.__struct_fields__[int(place[1])]
    return InvalidRequest(f"{name}{place[2]} has the wrong type: {text[: place.start()]}", param=name)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _shown(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
