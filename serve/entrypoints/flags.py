"""Turns the settings of config.py into command-line flags and parsed flags back into settings."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Final, NoReturn, TypeVar

from serve.config import (
    ENVIRONMENT_HELP,
    ServeConfig,
    assemble,
    field_names,
    groups,
)
from serve.errors import ConfigError

_T = TypeVar("_T")
_COUNT_SUFFIXES: Final = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
_BYTE_UNITS: Final = {
    **_COUNT_SUFFIXES,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    "B": 1,
}
PULL_USAGE: Final = "serve pull [--revision REVISION] MODEL"
BATCH_USAGE: Final = "serve run-batch -i INPUT -o OUTPUT [MODEL] [flags]"
_ONE_REPLICA: Final = "this version serves one replica on one machine"
# Flags of other servers that we do not have, and what to do without them.
FOREIGN_FLAGS: Final = {
    "--tensor-parallel-size": _ONE_REPLICA,
    "--pipeline-parallel-size": _ONE_REPLICA,
    "--data-parallel-size": _ONE_REPLICA,
    "--trust-remote-code": "code that comes with a model is never run",
    "--quantization": "the format is read from the checkpoint: .gguf, AWQ, GPTQ or compressed-tensors as MODEL",
    "--enable-lora": "this version serves no adapters; merge the adapter into the checkpoint",
    "--speculative-config": "this version has no speculative decoding",
    "--device": "this version computes on the CPU",
    "--config": "settings are flags, and there is no settings file; `serve --help` lists them",
}
_NUMBER: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_count(text: str) -> int:
    """Read a count: 4096, 8k (8000), 8K (8192), 1.5M. Raises ValueError that says what is accepted."""
    return _scaled(text, _COUNT_SUFFIXES, "a whole number such as 4096, 8k (8000) or 8K (8192)")


def parse_bytes(text: str) -> int:
    """Read a size: 1073741824, 2GiB, 500MB, 2G (binary). Raises ValueError that says what is accepted."""
    return _scaled(text, _BYTE_UNITS, "a size such as 1073741824, 512MiB or 2GiB")


def _scaled(text: str, units: Mapping[str, int], accepted: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (match[2] and match[2] not in units):
        raise ValueError(f"{text!r} is not {accepted}")
    factor = units[match[2]] if match[2] else 1
    value = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
    if value != int(value):
        raise ValueError(f"{text!r} is not {accepted}")
    return _in_64_bits(int(value), text)


def parse_json_object(text: str) -> dict[str, object]:
    """Read a JSON object; NaN and Infinity are refused."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("the JSON value nests too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def flag_name(field: dataclasses.Field[object]) -> str:
    """Give the long flag of a setting."""
    return "--" + field.name.replace("_", "-")


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose complaints are ConfigErrors, so that they become one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> FlagParser:
    """Build the parser of `serve [MODEL] [flags]`; every flag comes from a field of the settings."""
    parser = FlagParser(
        prog="serve",
        usage=f"serve [MODEL] [flags]\n       {PULL_USAGE}\n       {BATCH_USAGE}\n       serve --version",
        description="Serve a language model over HTTP with the OpenAI API.",
        epilog=_environment_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    for title, group in groups():
        section = parser.add_argument_group(title)
        hints = typing.get_type_hints(group)
        for field in dataclasses.fields(group):
            _add_flag(section, field, hints[field.name])
    return parser


def _add_flag(section: argparse._ArgumentGroup, field: dataclasses.Field[object], hint: object) -> None:
    meta = field.metadata
    default = _default(field)
    help_text = _help(meta["help"], meta["kind"], default)
    names = [flag_name(field), *([meta["alias"]] if meta["alias"] else [])]
    if meta["positional"]:
        section.add_argument("model_argument", nargs="?", metavar="MODEL", help=help_text)
        section.add_argument(*names, dest=field.name, metavar="MODEL", help="the same as the MODEL argument")
    elif _plain_type(hint) is bool:
        section.add_argument(
            *names, dest=field.name, action=argparse.BooleanOptionalAction, help=help_text, default=None
        )
    elif meta["kind"] in ("list", "secret"):
        section.add_argument(
            *names, dest=field.name, nargs="+", action="extend", metavar=_metavar(field.name), help=help_text
        )
    else:
        section.add_argument(
            *names,
            dest=field.name,
            type=_checked(_converter(meta["kind"], _plain_type(hint)), names[0]),
            choices=meta["choices"],
            metavar=None if meta["choices"] else _metavar(field.name),
            help=help_text,
        )


def _default(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def default_text(default: object) -> str:
    """Give a default as the user would type it, on or off for a switch; empty when there is none."""
    match default:
        case None | () | "":
            return ""
        case dict() if not default:
            return ""
        case bool():
            return "on" if default else "off"
        case tuple():
            return " ".join(str(value) for value in default)
        case str():
            return default
        case _:
            return json.dumps(default)


def _help(text: str, kind: str, default: object) -> str:
    typed = default_text(default)
    shown = f" (default: {typed})" if typed and kind != "secret" and "default" not in text else ""
    return (text + shown).replace("%", "%%")


def _environment_help() -> str:
    width = max(len(name) for name, _, _ in ENVIRONMENT_HELP)
    lines = [
        f"  {name:{width}}  {meaning}" + (f" (default: {default})" if default else "")
        for name, default, meaning in ENVIRONMENT_HELP
    ]
    return "\n".join(["environment:", *lines])


def _metavar(name: str) -> str:
    return name.rsplit("_", 1)[-1].upper()


def _plain_type(hint: object) -> type:
    """Give the type of a hint without its None."""
    if isinstance(hint, UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    origin = typing.get_origin(hint)
    plain = origin if origin is not None else hint
    assert isinstance(plain, type), f"settings are typed with classes, got {hint}"
    return plain


def _converter(kind: str, plain: type) -> Callable[[str], object]:
    by_kind: dict[str, Callable[[str], object]] = {
        "count": parse_count,
        "bytes": parse_bytes,
        "json": parse_json_object,
    }
    if kind in by_kind:
        return by_kind[kind]
    by_type: dict[type, Callable[[str], object]] = {int: _parse_int, float: _parse_float, str: str}
    return by_type[plain]


def _parse_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None
    return _in_64_bits(value, text)


def _in_64_bits(value: int, text: str) -> int:
    """Check what the engine core, to which the settings are sent, can read."""
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{text!r} does not fit in 64 bits")
    return value


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _checked(convert: Callable[[str], object], name: str) -> Callable[[str], object]:
    def parse(text: str) -> object:
        try:
            return convert(text)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None

    return parse


def parse_flags(parser: FlagParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse flags; underscores in flag names count as dashes. Raises ConfigError for what is not understood."""
    parsed, extra = parser.parse_known_args([_with_dashes(text) for text in argv])
    if extra:
        raise ConfigError(_unknown(parser, extra[0]))
    return parsed


def _with_dashes(text: str) -> str:
    if not text.startswith("--"):
        return text
    name, equals, value = text.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown(parser: FlagParser, text: str) -> str:
    name = text.partition("=")[0]
    if not name.startswith("-"):
        return f"argument {text!r} is one too many; MODEL is the only one without a flag"
    if name in FOREIGN_FLAGS:
        return f"unknown flag {name}: {FOREIGN_FLAGS[name]}"
    known = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"unknown flag {name}" + (f"; did you mean {close[0]}?" if close else "; `serve --help` lists all flags")


def config_from_flags(parsed: argparse.Namespace) -> ServeConfig:
    """Build the settings from parsed flags; what was not given keeps its default."""
    given = {name: value for name, value in vars(parsed).items() if value is not None}
    positional = given.pop("model_argument", None)
    if positional is not None and given.setdefault("model", positional) != positional:
        raise ConfigError(f"MODEL {positional} and --model {given['model']} differ; give one of them")

    def fill(group: type[_T], /) -> _T:
        """Give one group of settings; list flags become tuples."""
        chosen: dict[str, object] = {}
        for name in given.keys() & field_names(group):
            value = given[name]
            chosen[name] = _list_value("--" + name.replace("_", "-"), value) if isinstance(value, list) else value
        return group(**chosen)

    return assemble(fill)


def _list_value(name: str, values: list[str]) -> tuple[str, ...]:
    """Flatten a list flag; one value that is a JSON list (as vLLM's CORS flags take) is read as such."""
    if len(values) == 1 and values[0].startswith("["):
        try:
            listed = json.loads(values[0])
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}: {values[0]!r} is not a JSON list: {error.msg}") from None
        if not all(isinstance(item, str) for item in listed):
            raise ConfigError(f"{name}: {values[0]!r} must be a list of strings")
        return tuple(listed)
    return tuple(values)
