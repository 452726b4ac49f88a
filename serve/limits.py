"""What one request may ask for at most: one flag each, and one wording for what is beyond it."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Final

from serve.errors import InvalidRequest
from serve.setting import flag

# The HTTP parser gives up at these, whatever the flags say.
HIGHEST_HEADER_BYTES: Final = 256 << 10
HIGHEST_NUM_HEADERS: Final = 2048
# The JSON decoder gives up soon after this.
HIGHEST_JSON_DEPTH: Final = 500
# Entries are looked at one by one, while other requests wait.
HIGHEST_LOGIT_BIAS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of one HTTP request. Past them the answer is 400, or 431 for headers."""

    max_header_bytes: int = flag(64 << 10, "bytes of request headers, names and values", kind="bytes")
    max_num_headers: int = flag(256, "request headers")
    max_json_depth: int = flag(200, "levels of nesting in a request body")
    max_n: int = flag(128, "choices of one prompt (n)")
    max_stop: int = flag(16, "stop strings")
    max_stop_chars: int = flag(1024, "characters of all stop strings together", kind="count")
    max_stop_token_ids: int = flag(128, "stop token ids")
    max_bad_words: int = flag(128, "bad words")
    max_bad_words_chars: int = flag(16384, "characters of all bad words together", kind="count")
    max_logit_bias: int = flag(1024, "entries of logit_bias")
    max_logprob_token_ids: int = flag(128, "ids in logprob_token_ids")
    max_num_inputs: int = flag(2048, "texts in one request to a pooling model", kind="count")
    max_tools: int = flag(128, "tools of a chat request")
    max_schema_bytes: int = flag(64 << 10, "bytes of a JSON schema, also of all tools that are forced", kind="bytes")
    max_schema_depth: int = flag(64, "levels of nesting in a JSON schema")
    max_regex_chars: int = flag(8192, "characters of a regular expression", kind="count")
    max_grammar_chars: int = flag(64 << 10, "characters of a grammar", kind="count")
    max_choices: int = flag(1024, "texts of structured_outputs.choice", kind="count")
    max_choice_chars: int = flag(64 << 10, "characters of all texts of structured_outputs.choice", kind="count")


def check_count(values: Sized, limit: int, *, param: str, what: str, flag_name: str) -> None:
    """Raise InvalidRequest when values holds more than limit items; what names them in the plural."""
    if len(values) > limit:
        raise too_many(len(values), limit, param=param, what=what, flag_name=flag_name)


def too_many(count: int, limit: int, *, param: str, what: str, flag_name: str) -> InvalidRequest:
    """Give the refusal of count where limit is allowed."""
    return InvalidRequest(
        f"{param} has {count} {what}, the limit is {limit}; send fewer or start the server with a larger {flag_name}",
        param=param,
    )
