"""Phase 1 of 11: chat templates: which one to use, what content it wants, and rendering it inside bounds.

A template comes with the model and is treated as hostile: it runs in jinja2's immutable sandbox, it has a time
limit and an output limit, and it sees plain JSON values only.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from threading import Lock
from types import BuiltinMethodType
from typing import Final

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from serve.errors import ConfigError, InvalidRequest
from serve.renderers.messages import ContentFormat

RENDER_SECONDS: Final = 5.0
_MAX_TEMPLATE_CHARS: Final = 1 << 20
_MAX_REPEATED: Final = 1 << 20
_MAX_VALUE_CHARS: Final = 1 << 26
_MAX_EXPONENT: Final = 64
_CACHED_TEMPLATES: Final = 16
_GROWING_FILTERS: Final = ("batch", "center", "format", "indent", "join", "replace", "slice", "truncate", "wordwrap")
# Names of what the rewritten template calls: no template can spell them.
_CHECK_TIME: Final = "0check_time"
_JOIN: Final = "0join"
_FORMAT_WIDTH: Final = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)")
# Python's own complaints about what a template does with its values, for example adding a list to a string.
_VALUE_ERRORS: Final = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

TimeSource = Callable[[], float]


class GenerationTag(Extension):
    """Accept {% generation %} ... {% endgeneration %}, which marks text for training, and render its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Give the block's body as a call block, so that it keeps a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render_body"), [], [], body).set_lineno(line)

    def render_body(self, caller: Macro) -> str:
        """Give the text of the block."""
        return str(caller())


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox: jinja2's, without text formatting by attribute, and without ways to make huge values cheaply."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Refuse repetition, powers and padded formatting beyond any use in a chat."""
        if operator == "*" and max(_repeated_length(left, right), _repeated_length(right, left)) > _MAX_REPEATED:
            raise SecurityError("the chat template repeats a value too often")
        if operator == "**" and isinstance(right, (int, float)) and abs(right) > _MAX_EXPONENT:
            raise SecurityError(f"the chat template uses an exponent above {_MAX_EXPONENT}")
        if operator == "%" and isinstance(left, str) and _FORMAT_WIDTH.search(left):
            raise SecurityError("the chat template formats text with a width of five or more digits")
        result: object = super().call_binop(context, operator, left, right)
        limit = _MAX_VALUE_CHARS if isinstance(result, str) else _MAX_REPEATED
        if isinstance(result, (str, list, tuple)) and len(result) > limit:
            raise SecurityError(f"the chat template makes a value longer than {limit}")
        return result

    def call(self, context: Context, callee: object, /, *args: object, **kwargs: object) -> object:
        """Call what the sandbox allows; text methods do not take widths beyond any use in a chat."""
        if isinstance(callee, BuiltinMethodType) and isinstance(callee.__self__, (str, bytes, int)):
            _check_growth(callee.__name__, callee.__self__, *args, *kwargs.values())
        result: object = super().call(context, callee, *args, **kwargs)
        return result

    def wrap_str_format(self, value: object) -> None:
        """Give no safe stand-in for str.format, so that is_safe_attribute sees it and refuses it."""

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Allow what the sandbox allows, except str.format: its fields read attributes and pad without a bound."""
        return attr not in ("format", "format_map") and super().is_safe_attribute(obj, attr, value)


def _check_growth(name: str, *values: object) -> None:
    """Refuse a text method or filter whose result could be far longer than what it is given; values[0] is its text."""
    texts = [len(value) for value in values if isinstance(value, (str, bytes, list, tuple))] or [1]
    numbers = [abs(value) for value in values[1:] if isinstance(value, int)]
    if max(numbers, default=0) > _MAX_REPEATED or max(numbers, default=0) * texts[0] > _MAX_VALUE_CHARS:
        raise SecurityError("the chat template pads text too far")
    if name in ("replace", "join", "wordwrap", "indent") and len(texts) > 1:
        longest, *others = sorted(texts, reverse=True)
        if longest * max(others) > _MAX_VALUE_CHARS:
            raise SecurityError(f"the chat template may make a value longer than {_MAX_VALUE_CHARS}")


def _bounded(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Wrap one of jinja2's filters with the bounds of text methods."""

    @functools.wraps(function)  # keeps jinja2's marks of what the filter wants as its first argument
    def call(*args: object, **kwargs: object) -> object:
        values = [*args, *kwargs.values()]
        if not isinstance(values[0], (str, list, tuple)):
            values = values[1:]  # the environment or the evaluation context
        if name == "format" and isinstance(values[0], str) and _FORMAT_WIDTH.search(values[0]):
            raise SecurityError("the chat template formats text with a width of five or more digits")
        _check_growth(name, *values)
        return function(*args, **kwargs)

    return call


def _repeated_length(value: object, times: object) -> int:
    """Give the length of value * times when that repeats a sequence, else 0."""
    return len(value) * times if isinstance(value, (str, list, tuple)) and isinstance(times, int) else 0


class TemplateNamespace(jinja2.utils.Namespace):
    """The namespace() of templates, without names that begin with an underscore."""

    def __init__(*args: object, **kwargs: object) -> None:  # a template may name a value self
        for name in kwargs:
            _check_public(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: object) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"the chat template sets the namespace attribute {name!r}, which begins with _")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> TemplateEnvironment:
    """Build the environment that chat templates are written for: transformers' filters, functions and settings."""
    # optimized=False: constant expressions would otherwise run at compile time, outside the bounds of a render.
    environment = TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], optimized=False
    )
    environment.filters["tojson"] = _tojson
    for name in _GROWING_FILTERS:
        environment.filters[name] = _bounded(name, environment.filters[name])
    del environment.globals["lipsum"]  # makes as much text as it is asked for
    environment.globals.update(
        {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": TemplateNamespace,
            _JOIN: _join,
        }
    )
    return environment


class ChatTemplate:
    """One compiled template. Raises InvalidRequest (param chat_template) when the text is no template."""

    def __init__(self, environment: TemplateEnvironment, text: str) -> None:
        if len(text) > _MAX_TEMPLATE_CHARS:
            raise InvalidRequest(
                f"the chat template has {len(text)} characters; at most {_MAX_TEMPLATE_CHARS} are allowed",
                param="chat_template",
            )
        try:
            tree = environment.parse(text)
            self.variables = frozenset(meta.find_undeclared_variables(tree) - environment.globals.keys())
            names = _MessageNames(tree)
            self.content_format: ContentFormat = "openai" if names.loops_over_content() else "string"
            self.knows_null_content = names.tests_content_for_none()
            self.wants_text_arguments = _adds_arguments_to_text(tree)
            self._template = environment.from_string(_BoundsTransformer().visit(tree))
        except (TemplateSyntaxError, RecursionError) as error:
            raise InvalidRequest(f"the chat template is not valid: {error}", param="chat_template") from None
        self.text = text

    def render(
        self,
        variables: Mapping[str, object],
        *,
        max_chars: int,
        max_seconds: float = RENDER_SECONDS,
        now: TimeSource = time.monotonic,
    ) -> str:
        """Give the prompt text. Raises InvalidRequest when the template refuses, fails, or exceeds a bound."""
        used = {name: value for name, value in variables.items() if name in self.variables}
        pieces: list[str] = []
        num_chars = 0
        used[_CHECK_TIME] = _time_check(now, max_seconds)
        try:
            for piece in self._template.generate(used):
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise InvalidRequest(
                        f"the chat template wrote more than {max_chars} characters for these messages",
                        param="messages",
                    )
                pieces.append(piece)
        except InvalidRequest:
            raise
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refused: {error.message or error}", param="messages") from None
        except _VALUE_ERRORS as error:
            raise InvalidRequest(f"the chat template failed: {error}", param="messages") from None
        return "".join(pieces)


class _BoundsTransformer(NodeTransformer):
    """Rewrite a template so that it bounds itself: a thread cannot be stopped from outside.

    Every loop round and macro call looks at the clock, and ~ goes through a function that limits its result; the
    operators are limited by TemplateEnvironment. Nothing else in a template can run long or grow fast.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_time_check(node, node.body)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_time_check(node, node.body)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_time_check(node, node.body)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call_hidden(_JOIN, node.nodes).set_lineno(node.lineno)

    def _with_time_check(self, node: nodes.Node, body: list[nodes.Node]) -> nodes.Node:
        self.generic_visit(node)
        body.insert(0, nodes.ExprStmt(_call_hidden(_CHECK_TIME, [])).set_lineno(node.lineno))
        return node


def _call_hidden(name: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), args, [], None, None)


def _join(*values: object) -> str:
    """Do what ~ does, up to a size."""
    text = "".join(map(str, values))
    if len(text) > _MAX_VALUE_CHARS:
        raise SecurityError(f"the chat template makes a text of more than {_MAX_VALUE_CHARS} characters")
    return text


def _time_check(now: TimeSource, max_seconds: float) -> Callable[[], None]:
    """Give a function that raises InvalidRequest once max_seconds have passed."""
    end = now() + max_seconds

    def check() -> None:
        if now() > end:
            raise InvalidRequest(f"the chat template did not finish within {max_seconds:g} s", param="chat_template")

    return check


class TemplateCache:
    """Compiled templates by text, the most recently used ones."""

    def __init__(self) -> None:
        self._environment = make_environment()
        self._lock = Lock()
        self._compiled: OrderedDict[str, ChatTemplate] = OrderedDict()

    def get(self, text: str) -> ChatTemplate:
        """Give the compiled form of a template. Raises InvalidRequest when the text is no template."""
        with self._lock:
            found = self._compiled.get(text)
            if found is None:
                found = self._compiled[text] = ChatTemplate(self._environment, text)
                if len(self._compiled) > _CACHED_TEMPLATES:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(text)
            return found


def load_chat_template(value: str | None, own: str | dict[str, str] | None) -> str | None:
    """Give the template that --chat-template means: a file's text, Jinja in one line, or a name of the model's own.

    In a line, backslash-n stands for a newline. Raises ConfigError when it is none of the three.
    """
    if value is None or (isinstance(own, dict) and value in own):
        return value
    if "{" in value:
        return value.replace("\\n", "\n")
    file = Path(value)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {value} is neither a readable file nor Jinja text: {error}") from None


def resolve_template(given: str | None, own: str | dict[str, str] | None, *, has_tools: bool) -> str:
    """Choose the template: the given one (text, or the name of one of the model's), else the model's own.

    With tools, the model's template named tool_use is preferred. Raises InvalidRequest when there is none.
    """
    named = own if isinstance(own, dict) else {} if own is None else {"default": own}
    if given is not None:
        return named.get(given, given)
    if has_tools and "tool_use" in named:
        return named["tool_use"]
    if "default" in named:
        return named["default"]
    if named:
        raise InvalidRequest(
            f"this model has no default chat template but the named ones {', '.join(sorted(named))}; "
            "start the server with --chat-template NAME",
            param="messages",
        )
    raise InvalidRequest(
        "this model has no chat template, so it cannot take messages; use /v1/completions, or start the server with "
        "--chat-template FILE",
        param="messages",
    )


class _MessageNames:
    """The variables of a template that stand for the messages, one message, or the content of one.

    Follows assignments and loops from messages on, through subscripts, slices and filters.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._messages, self._message, self._content = {"messages"}, {"message"}, set[str]()
        links: list[tuple[nodes.Node, nodes.Node, bool]] = [
            (assigned.target, assigned.node, False) for assigned in tree.find_all(nodes.Assign)
        ]
        links += [(loop.target, loop.iter, True) for loop in tree.find_all(nodes.For)]
        for _ in range(len(links) + 1):
            before = self._size()
            for target, source, is_loop in links:
                if isinstance(target, nodes.Name):
                    self._add(target.name, self._kind_of(source), is_loop=is_loop)
            if self._size() == before:
                break

    def loops_over_content(self) -> bool:
        """Tell whether the template loops over the content of a message, so that it wants a list of parts."""
        return any(self._kind_of(loop.iter) == "content" for loop in self._tree.find_all(nodes.For))

    def tests_content_for_none(self) -> bool:
        """Tell whether the template asks if the content of a message is none."""
        tests = (test for test in self._tree.find_all(nodes.Test) if test.name == "none")
        return any(self._kind_of(test.node) == "content" for test in tests)

    def _size(self) -> int:
        return len(self._messages) + len(self._message) + len(self._content)

    def _add(self, name: str, kind: str | None, *, is_loop: bool) -> None:
        if kind == "messages":
            (self._message if is_loop else self._messages).add(name)
        elif kind == "message" and not is_loop:
            self._message.add(name)
        elif kind == "content" and not is_loop:
            self._content.add(name)

    def _kind_of(self, node: nodes.Node | None) -> str | None:
        """Say what an expression stands for: messages, one message, its content, or None for anything else."""
        while isinstance(node, (nodes.Filter, nodes.Test)):
            node = node.node
        if isinstance(node, nodes.Name):
            names = (("content", self._content), ("message", self._message), ("messages", self._messages))
            return next((kind for kind, known in names if node.name in known), None)
        if not isinstance(node, (nodes.Getattr, nodes.Getitem)):
            return None
        key = _key_of(node)
        inner = self._kind_of(node.node)
        if inner == "message" and key == "content":
            return "content"
        if inner in ("messages", "content") and isinstance(key, nodes.Slice):
            return inner
        if inner == "messages" and not isinstance(key, str):
            return "message"
        return None


def _key_of(node: nodes.Node) -> object:
    """Give the name or constant that an expression takes from a value, or the expression inside its brackets."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem):
        return node.arg.value if isinstance(node.arg, nodes.Const) else node.arg
    return None


def _adds_arguments_to_text(tree: nodes.Template) -> bool:
    """Tell whether a template only ever adds the arguments of a call to text: an object would make it fail."""
    keys = (nodes.Getattr, nodes.Getitem)
    num_read = sum(_key_of(node) == "arguments" for node in tree.find_all(keys))
    sides = (side for add in tree.find_all(nodes.Add) for side in (add.left, add.right))
    num_added = sum(_key_of(side) == "arguments" for side in sides)
    return 0 < num_read == num_added
