"""Templates: byte-equal to transformers, detected content format, hostile ones bounded."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from serve.errors import ConfigError, InvalidRequest
from serve.renderers.chat_template import TemplateCache, load_chat_template, resolve_template
from tests.unit.renderers import templates

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter f\u00fcr <b>St\u00e4dte</b> & \u6771\u4eac",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Z\u00fcrich"}}}
USER = {"role": "user", "content": "  What is 2 < 3 && \u4f60\u597d?  "}
SYSTEM = {"role": "system", "content": "Be brief. "}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
TOOL_ROUND = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "sunny"}]
CHATS = {
    "one user turn": [USER],
    "system turn": [SYSTEM, USER],
    "three turns": [USER, ANSWER, USER],
    "system and history": [SYSTEM, USER, ANSWER, USER],
    "tool round": TOOL_ROUND,
    "empty content": [{"role": "user", "content": ""}],
}
STRING_TEMPLATES = {
    "chatml": templates.CHATML,
    "tools and thinking": templates.TOOLS_AND_THINKING,
    "headers and date": templates.HEADERS_AND_DATE,
    "strict": templates.STRICT,
}
LIMIT = 1_000_000


def reference(template: str, messages: object, **variables: object) -> str:
    """Render with transformers; the text, or the message of the template's error."""
    try:
        return render_jinja_template([messages], chat_template=template, **variables)[0][0]
    except Exception as error:
        return f"error: {error}"


def ours(template: str, messages: object, **variables: object) -> str:
    try:
        return TemplateCache().get(template).render({"messages": messages, **variables}, max_chars=LIMIT)
    except InvalidRequest as error:
        return f"error: {str(error).partition(': ')[2]}"


@pytest.mark.parametrize("template", STRING_TEMPLATES.values(), ids=STRING_TEMPLATES)
@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_transformers(
    template: str, messages: object, tools: object, add_generation_prompt: bool
) -> None:
    variables = {"tools": tools, "add_generation_prompt": add_generation_prompt, "bos_token": "<s>"}
    variables |= {"enable_thinking": False, "documents": None, "date_string": "30 Nov 2026"}
    assert ours(template, messages, **variables) == reference(template, messages, **variables)


def test_template_that_loops_over_parts_equals_transformers() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    expected = reference(templates.PARTS, messages, add_generation_prompt=True)
    assert "[USER]" in expected
    assert ours(templates.PARTS, messages, add_generation_prompt=True) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ {'b': [1, None], 'a': '<>&\u00e9'} | tojson }}",
        "{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=True) }}",
        "{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':')) }}",
        "{{ '\u00e9' | tojson(ensure_ascii=True) }}",
        "  {% if true %}\n  x\n  {% endif %}\n",
        "{% set ns = namespace(found=false) %}{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}"
        "{% set ns.found = i %}{% endfor %}{{ ns.found }}",
        "{{ messages[0].content ~ 1 ~ none ~ true }}",
        "{% generation %}  x {% set y = 1 %}{% endgeneration %}{{ y is defined }}",
        "{{ undefined_thing }}|{{ messages[0].missing }}",
        "{{ messages | map(attribute='role') | join(',') }}",
        "{{ 'abc'[::-1] + 'x' * 3 + '%s!' % 'y' }}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
        "{% macro m(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call m('a') %}b{% endcall %}",
    ],
)
def test_language_features_equal_transformers(template: str) -> None:
    assert ours(template, [USER]) == reference(template, [USER])


def test_date_function_formats_now() -> None:
    rendered = ours("{{ strftime_now('%Y') }}", [USER])
    assert rendered.isdigit()
    assert len(rendered) == 4


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (templates.CHATML, "string"),
        (templates.TOOLS_AND_THINKING, "string"),
        (templates.HEADERS_AND_DATE, "string"),
        (templates.STRICT, "string"),
        (templates.PARTS, "openai"),
        ("{% for m in messages %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for c in m.content | selectattr('type') %}{% endfor %}{% endfor %}", "openai"),
        ("{% set ms = messages[1:] %}{% for m in ms %}{% for c in m.content[1:] %}{% endfor %}{% endfor %}", "openai"),
        ("{% set first = messages[0] %}{% for c in first.content %}{{ c.text }}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% set x = m.content %}{% set y = x %}{% for c in y %}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% for c in m.tool_calls %}{{ c.name }}{% endfor %}{{ m.content }}{% endfor %}",
            "string",
        ),
        ("{% for d in documents %}{% for c in d.content %}{% endfor %}{% endfor %}", "string"),
        ("no messages at all", "string"),
    ],
)
def test_content_format_is_found_in_the_template(template: str, expected: str) -> None:
    assert TemplateCache().get(template).content_format == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ namespace.__init__.__globals__['sys'].modules }}",
        "{{ raise_exception.__globals__ ['jinja2'].x }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ ('{0.__class__}' | attr('format'))(messages) }}",
        "{{ self.__init__.__globals__.x }}",
        "{{ (messages | map('attr', '__class__') | list)[0].__base__ }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns['__class__'] = 1 %}{{ ns.__class__.__base__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'base' %}",
        "{{ 'a' * 100000000000 }}",
        "{{ [0] * 100000000000 }}",
        "{{ 9 ** 9999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ 'a'.ljust(100000000000) }}",
        "{{ 'a'.zfill(100000000000) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{% for i in range(10000000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ],
)
def test_escape_or_bomb_is_refused(template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TemplateCache().get(template).render({"messages": [dict(USER)]}, max_chars=LIMIT)
    assert "0x" not in str(caught.value)


def test_template_cannot_reach_the_time_check() -> None:
    compiled = TemplateCache().get("{% set check_time = none %}{{ self }}{{ check_time }}")
    assert "0check_time" not in compiled.variables


class StepClock:
    """A clock that moves on by a tenth of a second at each look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.1
        return self.seconds


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) if i is odd %}{% set x = i %}{% else %}{% endfor %}",
    ],
)
def test_endless_template_stops_at_its_time_limit(template: str) -> None:
    clock = StepClock()
    with pytest.raises(InvalidRequest, match="did not finish within 5 s"):
        TemplateCache().get(template).render({"messages": []}, max_chars=LIMIT, now=clock)
    assert clock.seconds < 5.5


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x'|center(10**9) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ 'a'|batch(10**9, 'x')|list }}",
        "{{ 'a'|slice(10**9)|list }}",
        "{{ 'a'|indent(10**9) }}",
        "{{ ['a', 'b']|map('center', 10**9)|list }}",
        "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('b' * 100000).join(['a'] * 100000) }}",
        "{{ (['a'] * 100000)|join('b' * 100000) }}",
        "{{ ('a ' * 100000)|wordwrap(1, wrapstring='b' * 100000) }}",
        "{{ ('\t' * 100000).expandtabs(100000) }}",
        "{{ (1).to_bytes(10**9, 'big')|length }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ lipsum(n=1000000) }}",
    ],
)
def test_filters_and_methods_that_would_make_huge_values_are_refused_before_they_do(template: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"pads|longer than|width|'lipsum' is undefined"):
            TemplateCache().get(template).render({"messages": []}, max_chars=LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_bounded_filters_do_what_they_should() -> None:
    text = "{{ 'ab'|center(4) }}|{{ 'a,b'|replace(',', '; ') }}|{{ ['a', 'b']|join('-') }}|{{ '%s!'|format('a') }}"
    assert TemplateCache().get(text).render({"messages": []}, max_chars=LIMIT) == " ab |a; b|a-b|a!"
    lines = "{{ 'a\nb'|indent(2) }}|{{ [1, 2, 3]|batch(2)|list }}|{{ 'a b'|wordwrap(1, wrapstring='/') }}"
    assert TemplateCache().get(lines).render({"messages": []}, max_chars=LIMIT) == "a\n  b|[[1, 2], [3]]|a/b"


def test_output_limit_stops_the_render_early() -> None:
    template = TemplateCache().get("{% for i in range(99999) %}{{ i }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        template.render({"messages": []}, max_chars=1000)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for %}", "is not valid"),
        ("{{ ", "is not valid"),
        ("{{ messages | nofilter }}", "is not valid"),
        ("x" * (1 << 20) + "x", "at most 1048576"),
    ],
)
def test_text_that_is_no_template_is_refused(template: str, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match) as caught:
        TemplateCache().get(template)
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('only two roles') }}", "refused: only two roles"),
        ("{{ messages[0].content + [] }}", "can only concatenate"),
        ("{{ missing.attribute.deeper }}", "'missing' is undefined"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_failure_inside_a_template_is_the_requests_error(template: str, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        TemplateCache().get(template).render({"messages": [USER]}, max_chars=LIMIT)


def test_variables_cannot_replace_template_functions() -> None:
    template = TemplateCache().get("{{ raise_exception('stop') }}")
    with pytest.raises(InvalidRequest, match="stop"):
        template.render({"messages": [], "raise_exception": len}, max_chars=LIMIT)


def test_compiled_template_is_reused_and_old_ones_are_dropped() -> None:
    cache = TemplateCache()
    first = cache.get("0")
    assert cache.get("0") is first
    for i in range(1, 17):
        cache.get(str(i))
    assert cache.get("0") is not first


NAMED = {"default": "D", "tool_use": "T", "rag": "R"}


@pytest.mark.parametrize(
    ("given", "own", "has_tools", "expected"),
    [
        ("X {{ 1 }}", "own", False, "X {{ 1 }}"),
        (None, "own", True, "own"),
        (None, NAMED, False, "D"),
        (None, NAMED, True, "T"),
        ("rag", NAMED, True, "R"),
    ],
)
def test_template_choice(given: str | None, own: str | dict[str, str], has_tools: bool, expected: str) -> None:
    assert resolve_template(given, own, has_tools=has_tools) == expected


@pytest.mark.parametrize(
    ("own", "match"), [(None, "no chat template.*--chat-template"), ({"rag": "R"}, "named ones rag")]
)
def test_missing_template_says_what_to_do(own: dict[str, str] | None, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        resolve_template(None, own, has_tools=False)


def test_flag_takes_a_file_a_line_or_a_name(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ 'file' }}\n")
    assert load_chat_template(None, "own") is None
    assert load_chat_template(str(file), None) == "{{ 'file' }}\n"
    assert load_chat_template("a\\n{{ 1 }}", None) == "a\n{{ 1 }}"
    assert load_chat_template("rag", NAMED) == "rag"


def test_flag_that_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a readable file nor Jinja text"):
        load_chat_template(str(tmp_path / "missing.jinja"), NAMED)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{% if m['content'] is none %}-{% endif %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content %}{{ '' if c is not none else '-' }}{% endfor %}", True),
        ("{% for m in messages %}{% if m.name is none %}-{% endif %}{{ m.content }}{% endfor %}", False),
    ],
)
def test_templates_that_ask_for_null_content_are_found(template: str, expected: bool) -> None:
    assert TemplateCache().get(template).knows_null_content is expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 'x' + messages[0]['tool_calls'][0]['function']['arguments'] + 'y' }}", True),
        ("{{ messages[0].tool_calls[0].function.arguments | tojson }}", False),
        ("{{ 'x' + (messages[0].tool_calls[0].function.arguments | tojson) }}", False),
        ("{% set a = messages[0].arguments %}{% if a is string %}{{ 'x' + a }}{% endif %}", False),
        ("{{ messages[0].content + 'arguments' }}", False),
    ],
)
def test_templates_that_add_arguments_to_text_are_found(template: str, expected: bool) -> None:
    assert TemplateCache().get(template).wants_text_arguments is expected
