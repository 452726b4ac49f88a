"""LLM inference server: `serve MODEL`, spoken to with any OpenAI client; `from serve import LLM` in a program."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.entrypoints.llm import LLM as LLM
    from serve.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Give LLM or SamplingParams, whose modules are loaded only then: `import serve` itself costs nothing."""
    if name == "LLM":
        from serve.entrypoints.llm import LLM

        return LLM
    if name == "SamplingParams":
        from serve.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'serve' has no attribute {name!r}")
