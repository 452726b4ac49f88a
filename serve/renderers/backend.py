"""What the ways to load a tokenizer share: their result, the library's errors, begin and end tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from serve.errors import ConfigError, ExitCode


@dataclass(slots=True)
class TokenizerParts:
    """A loaded tokenizer before it is wrapped.

    special_tokens maps bos_token, eos_token, unk_token, pad_token ... to their text. chat_template may be a map of
    named templates.
    """

    backend: Backend
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | dict[str, str] | None = None


class LibraryErrors:
    """Turn the tokenizers library's errors into ConfigError: they are of the plain class Exception, or panics."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind in (Exception, TypeError, ValueError, OverflowError) or (kind and kind.__name__ == "PanicException"):
            raise ConfigError(f"{self._what}: {error}", ExitCode.MODEL) from error


def set_added_ends(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make the tokenizer add these tokens around a text when special tokens are asked for."""
    ends = [token for token in (bos, eos) if token is not None]
    single = " ".join([f"{bos}:0"] * (bos is not None) + ["$A:0"] + [f"{eos}:0"] * (eos is not None))
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=ids)
