"""The exception families of the server and their causes.

Each family maps to one HTTP status (entrypoints/api_server.py) or one process exit code (entrypoints/cli.py).
A message says what is wrong with the given value, the limit, and the way out.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Process exit codes; stable within a major version."""

    OK = 0
    CONFIG = 2
    MODEL = 3
    RESOURCES = 4
    ENGINE_DIED = 5
    INTERRUPTED = 130


class ServeError(Exception):
    """Base of all errors that carry a message meant for people."""


class ConfigError(ServeError):
    """A start-up failure: bad flag, unusable checkpoint, or too little memory or no port.

    exit_code tells which of the three: CONFIG, MODEL or RESOURCES.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.CONFIG) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class InvalidRequest(ServeError, ValueError):
    """The client's mistake: HTTP 400.

    param is the dotted path of the field at fault, or None. code replaces the HTTP status as `error.code`
    where a stable string is defined, for example "context_length_exceeded".
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFound(ServeError):
    """An unknown model or resource: HTTP 404."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def shown(value: object) -> str:
    """Give a client's word for a message: quoted and cut short, or that there is none."""
    return repr(value[:40]) if isinstance(value, str) else "missing" if value is None else "not a string"


class Overloaded(ServeError):
    """The server cannot take the request now: HTTP 429 (code "overloaded") or 503 (any other code).

    "overloaded" means that the waiting queue is full: the client sends too much. The other codes tell of a server
    that could not take even a first request, for example "loading", "draining" or "engine_busy". retry_after is in
    seconds.
    """

    def __init__(self, message: str, *, code: str = "overloaded", retry_after: int = 1) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class RequestFailed(ServeError):
    """This request failed inside the engine, which lives on: HTTP 500.

    cause is a fixed word such as "nan_logits" or "model_error".
    """

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class EngineDead(ServeError):
    """The engine core is gone: HTTP 500 for requests in flight, 503 for new ones, then the process ends."""

    def __init__(self, message: str = "engine_dead: the engine core stopped; the server is going down") -> None:
        super().__init__(message)
