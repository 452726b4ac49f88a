"""LLM inference server: `serve MODEL`, spoken to with any OpenAI client."""

__version__ = "0.1.0"
