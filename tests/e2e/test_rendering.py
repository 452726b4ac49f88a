"""From request to prompt: templates, special tokens, lengths (R1 to R17)."""

from __future__ import annotations

import psutil
import pytest

from tests.e2e.client import (
    chat,
    choice_of,
    complete,
    expect_refusal,
    messages,
    post,
    stream_complete,
    text_of,
    tokenize,
    usage_of,
)
from tests.e2e.server import Server, running

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TIGHT_LENGTH = 512

# What the built-in model's template makes of one user message.
RENDERED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
# Loops over content parts, so it wants lists.
PARTS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if shout is defined %}{{ shout }}{% endif %}"
)


def prompt_ids(server: Server, body: dict[str, object]) -> list[int]:
    """Give the ids that a chat request runs on."""
    response = post(server, CHAT, {"max_tokens": 1, "return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    return list(response.json()["prompt_token_ids"])


def decode(server: Server, ids: list[int]) -> str:
    return str(post(server, "/detokenize", {"tokens": ids}).json()["prompt"])


def test_r1_chat_and_tokenize_give_the_same_ids(server: Server) -> None:
    conversation = [*messages("Hello there.", system="Be brief."), {"role": "assistant", "content": "Hi."}]
    conversation += messages("Bye \U0001f600")
    tokens = post(server, "/tokenize", {"messages": conversation}).json()
    assert prompt_ids(server, {"messages": conversation}) == tokens["tokens"]
    assert tokens["count"] == len(tokens["tokens"])


def test_r2_chat_equals_a_completion_of_the_rendered_text(server: Server) -> None:
    rendered = tokenize(server, RENDERED.format("Name a colour."), add_special_tokens=False)
    assert prompt_ids(server, {"messages": messages("Name a colour.")}) == rendered
    answer = complete(server, RENDERED.format("Name a colour."), max_tokens=12, add_special_tokens=False)
    assert text_of(answer) == text_of(chat(server, "Name a colour.", max_tokens=12))


def test_r3_continue_final_message_ends_inside_the_last_message(server: Server) -> None:
    conversation = [*messages("Count."), {"role": "assistant", "content": "One, two,"}]
    body = {"messages": conversation, "continue_final_message": True, "add_generation_prompt": False}
    text = decode(server, prompt_ids(server, body))
    assert text.endswith("<|im_start|>assistant\nOne, two,")


def test_r4_continuing_and_opening_a_turn_exclude_each_other(server: Server) -> None:
    body = {"messages": messages("x"), "continue_final_message": True, "add_generation_prompt": True}
    expect_refusal(post(server, CHAT, body), 400)


def test_r5_content_takes_the_form_that_the_template_wants(server: Server, parts: Server) -> None:
    listed = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "<|im_start|>user\na\nb<|im_end|>" in decode(server, prompt_ids(server, {"messages": listed}))
    assert "user\n[a][b]<|im_end|>" in decode(parts, prompt_ids(parts, {"messages": listed}))
    assert "user\n[plain]<|im_end|>" in decode(parts, prompt_ids(parts, {"messages": messages("plain")}))


def test_r6_template_in_the_request_is_refused(server: Server) -> None:
    body = {"messages": messages("x"), "chat_template": "{{ messages }}"}
    expect_refusal(post(server, CHAT, body), 400, "chat_template")
    hidden = {"messages": messages("x"), "chat_template_kwargs": {"chat_template": "{{ messages }}"}}
    expect_refusal(post(server, CHAT, hidden), 400)


def test_r7_unknown_template_variable_is_ignored_and_a_known_one_is_used(parts: Server) -> None:
    base = prompt_ids(parts, {"messages": messages("x")})
    assert prompt_ids(parts, {"messages": messages("x"), "chat_template_kwargs": {"whisper": "psst"}}) == base
    loud = prompt_ids(parts, {"messages": messages("x"), "chat_template_kwargs": {"shout": "HEY"}})
    assert decode(parts, loud) == decode(parts, base) + "HEY"


def test_r8_a_prompt_of_the_whole_context_is_refused_and_one_less_gives_one_token(tight: Server) -> None:
    full = post(tight, COMPLETIONS, {"prompt": [40] * TIGHT_LENGTH})
    assert expect_refusal(full, 400)["code"] == "context_length_exceeded"
    answer = complete(tight, [40] * (TIGHT_LENGTH - 1))
    assert usage_of(answer)["completion_tokens"] == 1
    assert choice_of(answer)["finish_reason"] == "length"


def test_r9_prompt_plus_output_over_the_context_names_the_numbers(server: Server) -> None:
    count = len(prompt_ids(server, {"messages": messages("Hello")}))
    response = post(server, CHAT, {"messages": messages("Hello"), "max_tokens": 8190})
    error = expect_refusal(response, 400)
    assert error["code"] == "context_length_exceeded"
    message = str(error["message"])
    assert "8192" in message
    assert "8190" in message
    assert str(count) in message


def test_r10_megabytes_of_text_are_refused_without_tokenizing(server: Server) -> None:
    text = "lorem ipsum " * 500_000
    process = psutil.Process(server.process.pid)
    before = process.cpu_times().user
    error = expect_refusal(post(server, COMPLETIONS, {"prompt": text}), 400)
    took = process.cpu_times().user - before
    assert error["code"] == "context_length_exceeded"
    # Tokenizing these six megabytes takes several seconds of the processor.
    assert took < 1.5


def test_r11_truncation_keeps_the_asked_side(server: Server) -> None:
    text = "one two three four five six seven eight nine ten"
    ids = tokenize(server, text)

    def used(**fields: object) -> list[int]:
        answer = complete(server, text, max_tokens=1, return_token_ids=True, **fields)
        return list(choice_of(answer)["prompt_token_ids"])  # type: ignore[call-overload]

    assert used(truncate_prompt_tokens=5, truncation_side="left") == ids[-5:]
    assert used(truncate_prompt_tokens=5, truncation_side="right") == ids[:5]
    assert used(truncate_prompt_tokens=-1) == ids


def test_r11_truncation_to_the_context_makes_a_long_prompt_fit(tight: Server) -> None:
    answer = complete(tight, "word " * 2000, max_tokens=4, truncate_prompt_tokens=-1)
    assert usage_of(answer)["prompt_tokens"] == TIGHT_LENGTH - 4
    assert usage_of(answer)["completion_tokens"] == 4


@pytest.mark.parametrize("ids", [[49152], [5, 10**6], [-1], [2**63]])
def test_r12_token_ids_outside_the_vocabulary_are_refused(server: Server, ids: list[int]) -> None:
    expect_refusal(post(server, COMPLETIONS, {"prompt": ids}), 400)


def test_r13_output_limits_without_max_tokens(tight: Server) -> None:
    plain = complete(tight, "Once upon a time", ignore_eos=True)
    null = complete(tight, "Once upon a time", ignore_eos=True, max_tokens=None)
    assert usage_of(plain)["completion_tokens"] == usage_of(null)["completion_tokens"] == 16
    unlimited = chat(tight, "Tell a story. " * 100, ignore_eos=True)
    assert usage_of(unlimited)["completion_tokens"] > 16
    assert usage_of(unlimited)["total_tokens"] == TIGHT_LENGTH
    assert choice_of(unlimited)["finish_reason"] == "length"


def test_r14_choices_are_prompt_major_and_usage_sums(server: Server) -> None:
    prompts = ["Red and", "One, two,", "Once upon"]
    answer = complete(server, prompts, n=2, max_tokens=3, ignore_eos=True)
    choices = answer["choices"]
    assert isinstance(choices, list)
    assert [c["index"] for c in choices] == [0, 1, 2, 3, 4, 5]
    for index, prompt in enumerate(prompts):
        alone = text_of(complete(server, prompt, max_tokens=3, ignore_eos=True))
        assert text_of(answer, 2 * index) == text_of(answer, 2 * index + 1) == alone
    assert usage_of(answer)["completion_tokens"] == 18
    assert usage_of(answer)["prompt_tokens"] == sum(len(tokenize(server, p)) for p in prompts)


def test_r15_token_ids_and_their_text_give_the_same_answer(server: Server) -> None:
    text = "The capital of France is"
    ids = tokenize(server, text)
    assert text_of(complete(server, ids, max_tokens=8)) == text_of(complete(server, text, max_tokens=8))


def test_r16_echo_without_output_returns_the_prompt(server: Server) -> None:
    answer = complete(server, "Hello world", echo=True, max_tokens=0)
    assert text_of(answer) == "Hello world"
    assert usage_of(answer)["completion_tokens"] == 0
    expect_refusal(post(server, COMPLETIONS, {"prompt": "Hello world", "max_tokens": 0}), 400, "max_tokens")


def test_echo_prepends_the_prompt_in_plain_and_streamed_answers(server: Server) -> None:
    alone = text_of(complete(server, "Hello world", max_tokens=6))
    assert text_of(complete(server, "Hello world", max_tokens=6, echo=True)) == "Hello world" + alone
    assert stream_complete(server, "Hello world", max_tokens=6, echo=True).text() == "Hello world" + alone


def test_r17_tools_without_a_choice_are_refused(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    error = expect_refusal(post(server, CHAT, {"messages": messages("x"), "tools": [tool]}), 400)
    assert "tool" in str(error["message"])


@pytest.fixture(scope="module")
def parts(built_in_model: str, tmp_path_factory: pytest.TempPathFactory) -> object:
    """A server whose template loops over content parts."""
    path = tmp_path_factory.mktemp("template") / "parts.jinja"
    path.write_text(PARTS_TEMPLATE)
    flags = ("--chat-template", str(path), "--max-model-len", "512", "--kv-cache-memory", "128MiB")
    with running(*flags, model=built_in_model) as started:
        yield started
