"""The one table from error families to HTTP statuses, and the shapes of an error body: OpenAI's and Anthropic's."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from typing import Final

import msgspec

from serve.errors import EngineDead, InvalidRequest, NotFound, Overloaded, RequestFailed

log = logging.getLogger(__name__)

TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    421: "MisdirectedRequestError",
    429: "RateLimitError",
    431: "HeaderTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
# The words of the Messages API; any other status below 500 is the request's fault.
ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
}
Header = tuple[bytes, bytes]


class HttpError(Exception):
    """A refusal of the HTTP layer itself: no key, too large, unknown path. headers go out with the answer."""

    def __init__(self, status: int, message: str, *, headers: tuple[Header, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An answer that reports an error: status, body fields and extra headers."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: tuple[Header, ...] = ()

    def body(self) -> bytes:
        """Give the JSON body."""
        error = {
            "message": self.message,
            "type": TYPES[self.status],
            "param": self.param,
            "code": self.code if self.code is not None else self.status,
        }
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """Give the last event of a stream that fails."""
        return b"data: " + self.body() + b"\n\n"

    def anthropic_body(self, request_id: str) -> bytes:
        """Give the JSON body in the shape of the Messages API."""
        error = {"type": ANTHROPIC_TYPES.get(self.status, "invalid_request_error"), "message": self.message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})

    def anthropic_event(self, request_id: str) -> bytes:
        """Give the last event of a Messages stream that fails."""
        return b"event: error\ndata: " + self.anthropic_body(request_id) + b"\n\n"


def error_reply(error: BaseException, request_id: str) -> ErrorReply:
    """Map an error to its answer. Errors that are not meant for people become an opaque 500 and are logged here."""
    match error:
        case HttpError():
            return ErrorReply(error.status, str(error), headers=error.headers)
        case InvalidRequest():
            return ErrorReply(400, str(error), error.param, error.code)
        case NotFound():
            return ErrorReply(404, str(error), error.param, error.code)
        case Overloaded():
            status = 429 if error.code == "overloaded" else 503
            retry = (b"retry-after", str(error.retry_after).encode())
            return ErrorReply(status, str(error), code=error.code, headers=(retry,))
        case RequestFailed():
            log.error("request failed: request_id=%s cause=%s", request_id, error.cause)
            return ErrorReply(500, f"{error.cause}: the request failed inside the engine (request {request_id})")
        case EngineDead():
            return ErrorReply(500, str(error), code="engine_dead")
        case _:
            reference = uuid.uuid4().hex[:12]
            log.error("internal error: request_id=%s reference=%s", request_id, reference, exc_info=error)
            return ErrorReply(500, f"internal error (reference {reference})")


def unavailable(error: BaseException) -> ErrorReply:
    """Give the answer to new requests once the engine is gone."""
    return ErrorReply(503, str(error), code="engine_dead", headers=((b"retry-after", b"5"),))
