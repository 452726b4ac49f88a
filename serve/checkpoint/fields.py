"""Typed reading of a checkpoint's JSON: what is wrong is a ConfigError that names file and key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NoReturn

from serve.checkpoint.arch import ModelArch, RopeScaling
from serve.errors import ConfigError, ExitCode

_MAX_JSON_BYTES: Final = 256 << 20
# Beyond this a file is damaged, and listing the parameters of so many layers would only cost memory.
MAX_LAYERS: Final = 4096
_DTYPES: Final = ("float32", "bfloat16", "float16")


def fail(path: Path, problem: str) -> NoReturn:
    """Raise the ConfigError (exit code MODEL) about a file."""
    raise ConfigError(f"{path}: {problem}", ExitCode.MODEL)


def read_json(path: Path, *, required: bool) -> dict[str, object]:
    """Read a JSON object; an absent file gives an empty one unless it is required."""
    content = _read_content(path, required=required)
    if content is None:
        return {}
    if not isinstance(content, dict):
        fail(path, "does not hold a JSON object")
    return content


def read_json_list(path: Path) -> list[dict[str, object]]:
    """Read a JSON list of objects; an absent file gives an empty one."""
    content = _read_content(path, required=False)
    if content is None:
        return []
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        fail(path, "does not hold a JSON list of objects")
    return content


def _read_content(path: Path, *, required: bool) -> object:
    """Decode a file; None when it is absent and need not be there, so a null inside it comes back as its text."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            fail(path, f"has {size} bytes; at most {_MAX_JSON_BYTES} are read")
        content: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        if required:
            fail(path, "does not exist")
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", ExitCode.MODEL) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}", ExitCode.MODEL) from error
    return "null" if content is None else content


class Fields:
    """Typed access to a JSON object; a wrong type is a ConfigError that names file and key. null counts as absent."""

    def __init__(self, path: Path, content: Mapping[str, object]) -> None:
        self.path = path
        self._content = content

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = 1 << 31) -> int:
        value = self._content.get(key)
        value = default if value is None else value
        if value is None:
            fail(self.path, f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            fail(self.path, f"{key} is {value!r}, not an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional_number(key)
        if value is not None:
            return value
        if default is None:
            fail(self.path, f"{key} is missing")
        return default

    def optional_number(self, key: str) -> float | None:
        value = self._content.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
            fail(self.path, f"{key} is {value!r}, not a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._content.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            fail(self.path, f"{key} is {value!r}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self._content.get(key)
        value = default if value is None else value
        if value is not None and not isinstance(value, str):
            fail(self.path, f"{key} is {value!r}, not a string")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple; empty when absent."""
        value = self._content.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                fail(self.path, f"{key} is {value!r}, not a token id or a list of token ids")
        return tuple(items)

    def texts(self, key: str) -> list[str] | None:
        value = self._content.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            fail(self.path, f"{key} is not a list of strings")
        return value

    def child(self, key: str) -> Fields | None:
        value = self._content.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            fail(self.path, f"{key} is not an object")
        return Fields(self.path, value)

    @property
    def size(self) -> int:
        """Number of keys."""
        return len(self._content)

    def names(self) -> list[str]:
        return list(self._content)

    def has(self, key: str) -> bool:
        return self._content.get(key) is not None


def checkpoint_dtype(config: Fields) -> str:
    """Give the type that config.json says the weights have; float32 when it says nothing that is known."""
    dtype = config.text("dtype") or config.text("torch_dtype")
    return dtype if dtype in _DTYPES else "float32"


def check_rope(path: Path, theta: float, scaling: RopeScaling) -> None:
    """Refuse values that have no frequencies: the formulas divide by them or take their logarithm."""
    if theta <= 1.0:
        fail(path, f"rope_theta {theta} is not above 1")
    if scaling.factor < 1.0:
        fail(path, f"rope scaling factor {scaling.factor} is below 1")
    if scaling.high_freq_factor <= scaling.low_freq_factor or scaling.low_freq_factor <= 0:
        fail(path, "rope scaling needs 0 < low_freq_factor < high_freq_factor")
    if scaling.beta_fast <= 0 or scaling.beta_slow <= 0:
        fail(path, "rope scaling needs beta_fast and beta_slow above 0")


def producible(token_ids: Iterable[int], arch: ModelArch) -> tuple[int, ...]:
    """Keep each id once, without those beyond the vocabulary: no step can produce them."""
    return tuple(dict.fromkeys(i for i in token_ids if 0 <= i < arch.vocab_size))
