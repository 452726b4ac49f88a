"""Types that the request bodies share: numbers without booleans, bounded lists, and parts with fields of their own."""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve.limits import HIGHEST_LOGIT_BIAS

# Bounds on how many values are looked at one by one, so that a hostile body costs no more than its decoding.
MAX_TOKEN_IDS: Final = 1 << 20
MAX_MESSAGES: Final = 1 << 16
MAX_OPTIONS: Final = 1024
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not a boolean")
    return value


def drop_nulls(value: object) -> object:
    """Leave out what is null in an object: it means the default."""
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _no_bools(values: object) -> object:
    if isinstance(values, list) and bool in set(map(type, values)):
        raise ValueError("Input should hold numbers, not booleans")
    return values


def _first_wrong_number(values: object) -> object:
    """Raise for the first value that is no finite number: pydantic would report each of thousands."""
    if isinstance(values, dict):
        for key, value in values.items():
            if isinstance(value, bool) or not isinstance(value, (int, float, str)) or not _is_finite(value):
                raise ValueError(f"must map token ids to finite numbers, got {str(value)[:40]!r} for {str(key)[:40]!r}")
    return values


def _is_finite(value: float | str) -> bool:
    try:
        return math.isfinite(float(value))
    except (ValueError, OverflowError):
        return False


class AtMost:
    """A check of a container's length before its items are looked at."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __call__(self, values: object) -> object:
        if isinstance(values, (list, dict)) and len(values) > self._limit:
            raise ValueError(f"must hold at most {self._limit} entries, got {len(values)}")
        return values


Int = Annotated[int, BeforeValidator(_no_bool), Field(ge=INT64_MIN, le=INT64_MAX)]
Float = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=2**31 - 1)]],
    Field(fail_fast=True),
    BeforeValidator(_no_bools),
    BeforeValidator(AtMost(MAX_TOKEN_IDS)),
]
# One wrong item is enough: each report of pydantic takes microseconds, and a body can hold millions of items.
Strings = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_as_list)]
Objects = Annotated[list[dict[str, object]], Field(fail_fast=True), BeforeValidator(AtMost(MAX_MESSAGES))]
Options = Annotated[dict[str, object], BeforeValidator(AtMost(MAX_OPTIONS))]
XArgList = Annotated[list[str | int | float], Field(fail_fast=True), BeforeValidator(AtMost(MAX_OPTIONS))]
XArgs = Annotated[dict[str, str | int | float | XArgList], BeforeValidator(AtMost(MAX_OPTIONS))]
LogitBias = Annotated[
    dict[str, Float], BeforeValidator(_first_wrong_number), BeforeValidator(AtMost(HIGHEST_LOGIT_BIAS))
]


class StreamOptions(BaseModel):
    """What a stream reports besides text."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(BaseModel):
    """The schema of response_format json_schema. Every answer keeps to it; strict closes objects that are left open."""

    model_config = ConfigDict(extra="ignore", serialize_by_alias=True)
    name: str = Field(min_length=1)
    schema_: dict[str, object] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What the answer's text must be, in OpenAI's form; structures, triggers and format belong to structural_tag."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Annotated[JsonSchemaFormat | None, BeforeValidator(drop_nulls)] = None
    structures: list[dict[str, object]] | None = None
    triggers: list[str] | None = None
    format: dict[str, object] | None = None


class StructuredOutputsBody(BaseModel):
    """What the answer's text must be, in vLLM's form: exactly one of the first six, and how JSON is written."""

    model_config = ConfigDict(extra="ignore", serialize_by_alias=True)
    json_: dict[str, object] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, object] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class RepetitionDetectionBody(BaseModel):
    """When an answer counts as a loop: a pattern of that many tokens, that many times in a row."""

    model_config = ConfigDict(extra="ignore")
    max_pattern_size: Int
    min_pattern_size: Int = 1
    min_count: Int = 2
