"""Prompts from chats, text and ids: contents, length rules, and what stays off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from serve.errors import ConfigError, InvalidRequest
from serve.renderers.renderer import ChatRenderer, ChatRenderRequest, TemplateSettings, TokenizeParams
from serve.renderers.tokenizer import FastTokenizer
from serve.renderers.tokenizer_files import load_folder
from tests.unit.renderers import templates

LEN = 512
CHAT = TokenizeParams(add_special_tokens=False, max_total_tokens=LEN)
TEXT = TokenizeParams(add_special_tokens=True, max_total_tokens=LEN)
USER = {"role": "user", "content": "Say hi."}
OPEN = {"role": "assistant", "content": "Hello the"}


def renderer(tokenizer: FastTokenizer, template: str | None = templates.CHATML, **settings: object) -> ChatRenderer:
    chosen = replace(TemplateSettings(chat_template=template), **settings)
    return ChatRenderer(tokenizer, max_model_len=LEN, settings=chosen)


@pytest.fixture
async def chatml(bpe: FastTokenizer) -> AsyncIterator[ChatRenderer]:
    """A renderer with a plain template."""
    made = renderer(bpe)
    yield made
    made.close()


async def chat_text(made: ChatRenderer, *messages: dict[str, object], **fields: object) -> str:
    result = await made.render_chat(replace(ChatRenderRequest(list(messages), CHAT), **fields))
    assert result.text is not None
    return result.text


async def test_chat_prompt_equals_transformers(bpe_folder: Path, chatml: ChatRenderer) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(bpe_folder)
    for messages in ([USER], [USER, OPEN, USER], [{"role": "system", "content": "Be brief."}, USER]):
        result = await chatml.render_chat(ChatRenderRequest(messages, CHAT))
        options = {"chat_template": templates.CHATML, "add_generation_prompt": True}
        assert result.text == reference.apply_chat_template(messages, tokenize=False, **options)
        assert result.token_ids == reference.apply_chat_template(messages, return_dict=False, **options)


async def test_r2_chat_adds_no_bos_and_completion_does(chatml: ChatRenderer, bpe: FastTokenizer) -> None:
    chat = await chatml.render_chat(ChatRenderRequest([USER], CHAT))
    assert chat.token_ids[:2] == [1, bpe.encode("system", add_special_tokens=False)[0]]
    text = await chatml.render_text("hi", TEXT)
    assert text.token_ids == [1, *bpe.encode("hi", add_special_tokens=False)]
    bare = await chatml.render_text("hi", replace(TEXT, add_special_tokens=False))
    assert bare.token_ids == text.token_ids[1:]


@pytest.mark.parametrize("content", ["Hello the", "Hello  ", " Hello", "a\n", "x" * 300])
@pytest.mark.parametrize("template", [templates.CHATML, templates.HEADERS_AND_DATE, templates.STRICT])
async def test_r3_continued_message_equals_transformers(
    bpe_folder: Path, bpe: FastTokenizer, template: str, content: str
) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    reference = PreTrainedTokenizerFast.from_pretrained(bpe_folder).apply_chat_template(
        messages,
        chat_template=template,
        tokenize=False,
        continue_final_message=True,
        date_string="30 Nov 2026",
    )
    text = await chat_text(
        renderer(bpe, template),
        *messages,
        continue_final_message=True,
        add_generation_prompt=False,
        chat_template_kwargs={"date_string": "30 Nov 2026"},
    )
    assert text == reference
    assert text.endswith((content, content.strip()))


async def test_continued_message_of_parts_ends_inside_the_last_part(bpe: FastTokenizer) -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    made = renderer(bpe, templates.PARTS)
    text = await chat_text(made, USER, message, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("one\ntwo")


@pytest.mark.parametrize(
    ("message", "fields", "match"),
    [
        (OPEN, {"add_generation_prompt": True}, "add_generation_prompt false"),
        ({"role": "assistant", "content": ""}, {"add_generation_prompt": False}, "last message with text"),
        (OPEN, {"add_generation_prompt": False, "template": "{{ messages[0].content }}"}, "drops or changes"),
    ],
)
async def test_r4_message_that_cannot_be_continued_is_refused(
    bpe: FastTokenizer, message: dict[str, object], fields: dict[str, object], match: str
) -> None:
    template = str(fields.pop("template", templates.CHATML))
    with pytest.raises(InvalidRequest, match=match):
        await chat_text(renderer(bpe, template), USER, message, continue_final_message=True, **fields)


async def test_r5_string_reaches_a_parts_template_and_parts_a_string_template(bpe: FastTokenizer) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert "[USER]\na\nb\n" in (await chat_text(renderer(bpe, templates.PARTS), parts)).replace("  ", "")
    assert "\nSay hi.\n" in await chat_text(renderer(bpe, templates.PARTS), USER)
    assert "user\na\nb<|im_end|>" in await chat_text(renderer(bpe), parts)


async def test_content_format_flag_wins_over_detection(bpe: FastTokenizer) -> None:
    template = "{{ messages[0].content is string }}"
    assert await chat_text(renderer(bpe, template), USER) == "True"
    assert await chat_text(renderer(bpe, template, content_format="openai"), USER) == "False"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
async def test_r6_template_and_reserved_names_in_requests_are_refused(
    chatml: ChatRenderer, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await chat_text(chatml, USER, **fields)
    assert caught.value.param == param


async def test_trusted_request_template_is_used(bpe: FastTokenizer) -> None:
    made = renderer(bpe, trust_request_template=True)
    assert await chat_text(made, USER, chat_template="only {{ messages[0].content }}") == "only Say hi."
    with pytest.raises(InvalidRequest, match="may not set chat_template"):
        await chat_text(made, USER, chat_template_kwargs={"chat_template": "x"})


async def test_r7_unknown_kwarg_is_ignored_and_known_one_changes_the_prompt(bpe: FastTokenizer) -> None:
    made = renderer(bpe, templates.TOOLS_AND_THINKING)
    plain = await chat_text(made, USER)
    assert await chat_text(made, USER, chat_template_kwargs={"zzz": 1}) == plain
    switched = await chat_text(made, USER, chat_template_kwargs={"enable_thinking": False})
    assert switched == plain + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "|default||True"),
        ({"chat_template_kwargs": {"a": "request"}}, "|request||True"),
        ({"reasoning_effort": "low"}, "low|default|True|True"),
        ({"reasoning_effort": "none"}, "none|default|False|True"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none|default|True|True"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high|default||True"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "low|default|True|True"),
        ({"add_generation_prompt": False, "chat_template_kwargs": {"add_generation_prompt": True}}, "|default||False"),
    ],
)
async def test_later_sources_of_variables_win(bpe: FastTokenizer, fields: dict[str, object], expected: str) -> None:
    template = "{{ reasoning_effort }}|{{ a }}|{{ enable_thinking }}|{{ add_generation_prompt }}"
    made = renderer(bpe, template, default_kwargs={"a": "default"})
    assert await chat_text(made, USER, **fields) == expected


async def test_tools_documents_and_special_tokens_reach_the_template(bpe: FastTokenizer) -> None:
    made = renderer(bpe, "{{ bos_token }}{{ tools[0].x }}{{ documents[0].y }}{{ eos_token }}")
    text = await chat_text(made, USER, tools=[{"x": "T"}], documents=[{"y": "D"}])
    assert text == "<|im_start|>TD<|im_end|>"


async def test_empty_tool_list_is_no_tools(bpe: FastTokenizer) -> None:
    assert await chat_text(renderer(bpe, "{{ tools is none }}"), USER, tools=[]) == "True"


def test_operator_defaults_may_not_set_reserved_names(bpe: FastTokenizer) -> None:
    with pytest.raises(ConfigError, match="may not set messages"):
        renderer(bpe, default_kwargs={"messages": []})


def test_operator_template_that_is_none_is_refused_at_start(bpe: FastTokenizer) -> None:
    with pytest.raises(ConfigError, match="--chat-template: the chat template is not valid"):
        renderer(bpe, "{% for %}")


async def test_model_without_template_refuses_chat_and_takes_text(
    bpe_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = load_folder(bpe_folder)
    parts.chat_template = None
    made = renderer(FastTokenizer(parts), None)
    caplog.set_level("INFO", logger="serve")
    await made.warm_up(expects_chat=False)
    assert caplog.messages == []
    await made.warm_up()
    assert "chat is not available" in caplog.text
    with pytest.raises(InvalidRequest, match="no chat template"):
        await chat_text(made, USER)
    assert (await made.render_text("hi", TEXT)).text == "hi"


async def test_output_of_a_template_is_bounded_by_its_input(bpe: FastTokenizer) -> None:
    made = renderer(bpe, "{% for i in range(99999) %}xxxxxxxxxx{% endfor %}")
    with pytest.raises(InvalidRequest, match="wrote more than"):
        await made.render_chat(ChatRenderRequest([USER], replace(CHAT, max_total_tokens=None)))


def ids_of_length(bpe: FastTokenizer, count: int) -> tuple[str, list[int]]:
    """A text and its ids; each " hello" adds the same ids."""
    unit = bpe.encode(" hello", add_special_tokens=False)
    assert count % len(unit) == 0
    return " hello" * (count // len(unit)), unit * (count // len(unit))


async def test_r9_prompt_and_max_tokens_over_the_context_names_the_numbers(
    chatml: ChatRenderer, bpe: FastTokenizer
) -> None:
    text, ids = ids_of_length(bpe, 100)
    params = replace(CHAT, max_output_tokens=LEN - 99)
    for refuse in (chatml.render_text(text, params), as_awaitable(lambda: chatml.check_token_ids(ids, params))):
        with pytest.raises(
            InvalidRequest, match=r"max_tokens=413 .* 100 tokens makes 513.*=512.*at most 412"
        ) as caught:
            await refuse
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"
    fits = replace(params, max_output_tokens=LEN - 100)
    assert (await chatml.render_text(text, fits)).token_ids == ids
    assert chatml.check_token_ids(ids, fits).token_ids == ids


async def as_awaitable(work: object) -> object:
    assert callable(work)
    return work()


async def test_long_prompt_is_refused_with_a_lower_bound_of_its_length(
    chatml: ChatRenderer, bpe: FastTokenizer
) -> None:
    text, ids = ids_of_length(bpe, 2 * LEN)
    with pytest.raises(InvalidRequest, match="at least 513 tokens") as caught:
        await chatml.render_text(text, CHAT)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest, match="prompt of 1024 tokens"):
        chatml.check_token_ids(ids, CHAT)


async def test_length_error_of_a_chat_points_at_messages(chatml: ChatRenderer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await chatml.render_chat(ChatRenderRequest([{"role": "user", "content": "hello " * LEN}], CHAT))
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


class UntouchedTokenizer(FastTokenizer):
    """Fails when it is asked to tokenize."""

    def encode(self, text: str, *, add_special_tokens: bool, max_length: int | None = None) -> list[int]:
        raise AssertionError("the text was tokenized")


async def test_r10_text_that_cannot_fit_is_refused_without_tokenizing(bpe_folder: Path) -> None:
    made = renderer(UntouchedTokenizer(load_folder(bpe_folder)))
    huge = "a" * 5_000_000
    with pytest.raises(InvalidRequest, match="at least"):
        await made.render_text(huge, CHAT)
    with pytest.raises(InvalidRequest, match="at least"):
        await chat_text(made, {"role": "user", "content": [{"type": "text", "text": huge}]})


@pytest.mark.parametrize(
    ("side", "expected"), [("left", slice(-5, None)), ("right", slice(5)), (None, slice(-5, None))]
)
async def test_r11_truncation_keeps_the_last_or_the_first_ids(
    chatml: ChatRenderer, bpe: FastTokenizer, side: str | None, expected: slice
) -> None:
    text = "one two three four five six seven eight nine ten"
    ids = bpe.encode(text, add_special_tokens=True)
    params = replace(TEXT, truncate_prompt_tokens=5, truncation_side=side)
    assert (await chatml.render_text(text, params)).token_ids == ids[expected]
    assert chatml.check_token_ids(ids, params).token_ids == ids[expected]


async def test_r11_minus_one_makes_any_prompt_fit(chatml: ChatRenderer, bpe: FastTokenizer) -> None:
    text, ids = ids_of_length(bpe, 100 * LEN)
    params = replace(CHAT, truncate_prompt_tokens=-1, max_output_tokens=12)
    assert (await chatml.render_text(text, params)).token_ids == ids[-500:]
    assert (await chatml.render_text("short", params)).token_ids == bpe.encode("short", add_special_tokens=False)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": LEN + 1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": LEN, "max_output_tokens": 1}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"max_output_tokens": LEN + 1}, "max_tokens"),
    ],
)
async def test_impossible_length_parameters_are_refused(
    chatml: ChatRenderer, changes: dict[str, object], param: str
) -> None:
    params = replace(CHAT, **changes)
    for refuse in (chatml.render_text("a", params), as_awaitable(lambda: chatml.check_token_ids([5], params))):
        with pytest.raises(InvalidRequest) as caught:
            await refuse
        assert caught.value.param == param


async def test_without_a_limit_any_length_is_tokenized(chatml: ChatRenderer, bpe: FastTokenizer) -> None:
    text, ids = ids_of_length(bpe, 20 * LEN)
    assert (await chatml.render_text(text, replace(CHAT, max_total_tokens=None))).token_ids == ids


async def test_decode_gives_the_text_of_ids(chatml: ChatRenderer, bpe: FastTokenizer) -> None:
    ids = bpe.encode("hi \U0001f642", add_special_tokens=True)
    assert await chatml.decode(ids, skip_special_tokens=True) == "hi \U0001f642"
    assert await chatml.decode(ids, skip_special_tokens=False) == "<|im_start|>hi \U0001f642"


class BlockedTokenizer(FastTokenizer):
    """Tokenizes only after the event loop has shown that it runs."""

    started: threading.Event
    loop_ran: threading.Event

    def encode(self, text: str, *, add_special_tokens: bool, max_length: int | None = None) -> list[int]:
        self.started.set()
        assert self.loop_ran.wait(10), "the event loop stood still while a prompt was tokenized"
        return [5]


async def test_event_loop_runs_while_a_prompt_is_tokenized(bpe_folder: Path) -> None:
    tokenizer = BlockedTokenizer(load_folder(bpe_folder))
    tokenizer.started, tokenizer.loop_ran = threading.Event(), threading.Event()
    task = asyncio.create_task(renderer(tokenizer).render_text("a", CHAT))
    assert await asyncio.to_thread(tokenizer.started.wait, 10)
    tokenizer.loop_ran.set()
    assert (await task).token_ids == [5]


async def test_concurrent_prompts_keep_their_own_ids(bpe: FastTokenizer) -> None:
    made = ChatRenderer(
        bpe, max_model_len=LEN, settings=TemplateSettings(chat_template=templates.CHATML), num_workers=4
    )
    texts = [f"number {i} " * (i % 7 + 1) for i in range(200)]
    results = await asyncio.gather(*(made.render_text(text, TEXT) for text in texts))
    assert [r.token_ids for r in results] == [bpe.encode(text, add_special_tokens=True) for text in texts]
