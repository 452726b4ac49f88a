"""The files of `serve run-batch`: one request a line in, one answer a line out, in the format of OpenAI's batches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from serve.errors import ConfigError, ExitCode, InvalidRequest

BATCH_PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
BAD_LINE: Final = "invalid_line"
MAX_ID_CHARS: Final = 512
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # paths have lost the second slash


class BatchRequest(msgspec.Struct):
    """One line of the input file; body is the JSON object as it was sent."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why a line has no answer, or an answer that reports an error."""

    code: str | int
    message: str


class BatchResponse(msgspec.Struct):
    """The HTTP answer to a line; body is its JSON object."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchLine(msgspec.Struct):
    """One line of the output file. custom_id is null for an input line that has none."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line of the input file: the request, or what is wrong with the line."""

    custom_id: str | None
    request: BatchRequest | None
    problem: str = ""


class _Identity(msgspec.Struct):
    """What a line says about itself even when the rest of it is wrong."""

    custom_id: str | None = None


class _Streamed(msgspec.Struct):
    """The one field of a body that a batch must look at."""

    stream: object = False


def check_paths(source: Path, target: Path) -> None:
    """Raise ConfigError unless the batch can be read from source and written to target."""
    for path in (source, target):
        if _SCHEME.match(str(path)):
            raise ConfigError(f"{path} is a URL; a batch is read from and written to local files")
    if not source.is_file():
        raise ConfigError(f"--input-file {source} is not a file")
    if not target.parent.is_dir():
        raise ConfigError(f"--output-file {target} is in a folder that does not exist")
    if target.exists() and (not target.is_file() or target.samefile(source)):
        raise ConfigError(f"--output-file {target} cannot be written: it is the input, or not a file")


def count_lines(source: Path) -> int:
    """Count the lines that are not blank."""
    with source.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def read_lines(source: Path, *, max_bytes: int) -> Iterator[InputLine]:
    """Give the lines of a batch that are not blank, each checked; a custom_id counts once.

    max_bytes bounds a line.
    """
    seen: set[str] = set()
    with source.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            parsed = _parse_line(line, number, max_bytes)
            if parsed.custom_id is not None and parsed.custom_id in seen:
                parsed = InputLine(None, None, f"line {number}: custom_id {parsed.custom_id[:80]!r} was used before")
            elif parsed.custom_id is not None:
                seen.add(parsed.custom_id)
            yield parsed


def _parse_line(line: bytes, number: int, max_bytes: int) -> InputLine:
    custom_id: str | None = None
    try:
        if len(line) > max_bytes:
            raise InvalidRequest(f"it has {len(line)} bytes, the limit is {max_bytes}; see --max-body-bytes")
        custom_id = msgspec.json.decode(line, type=_Identity).custom_id
        request = msgspec.json.decode(line, type=BatchRequest)
        _check_request(request)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidRequest) as error:
        return InputLine(custom_id, None, f"line {number}: {error}")
    return InputLine(custom_id, request)


def _check_request(request: BatchRequest) -> None:
    if not 1 <= len(request.custom_id) <= MAX_ID_CHARS:
        raise InvalidRequest(f"custom_id must have 1 to {MAX_ID_CHARS} characters, got {len(request.custom_id)}")
    if request.method != "POST":
        raise InvalidRequest(f"method must be POST, got {request.method[:20]!r}")
    if request.url not in BATCH_PATHS:
        raise InvalidRequest(f"url {request.url[:80]!r} is not possible in a batch; it takes {', '.join(BATCH_PATHS)}")
    if msgspec.json.decode(request.body, type=_Streamed).stream:
        raise InvalidRequest("stream is not possible in a batch; leave it out")


class BatchOutput:
    """The output file: what it holds already, and a line at a time added, each on the disk before the next.

    Answered lines of an earlier run stay; half a line at the end, left by a run that was killed, is cut off.
    """

    def __init__(self, path: Path) -> None:
        self._done: set[str] = set()
        self.num_errors = 0
        try:
            self._file: IO[bytes] = path.open("a+b")
        except OSError as error:
            raise ConfigError(
                f"--output-file {path} cannot be written: {error.strerror}", ExitCode.RESOURCES
            ) from error
        try:
            self._resume()
        except ConfigError:
            self._file.close()
            raise

    @property
    def num_done(self) -> int:
        """Lines of the file."""
        return len(self._done)

    def has(self, line: InputLine) -> bool:
        """Tell whether the file answers a line already; one without an id is known by what is wrong with it."""
        return _key(line.custom_id, line.problem) in self._done

    def add(self, line: BatchLine) -> None:
        """Append a line. Raises ConfigError when it cannot be written."""
        self._done.add(_key(line.custom_id, line.error.message if line.error is not None else ""))
        self.num_errors += line.error is not None
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"--output-file {self._file.name} cannot be written: {error.strerror}", ExitCode.RESOURCES
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _resume(self) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                known = msgspec.json.decode(line, type=BatchLine)
            except msgspec.MsgspecError as error:
                raise ConfigError(
                    f"--output-file {self._file.name} line {number} is no line of a batch: {error}; name another file"
                ) from None
            self._done.add(_key(known.custom_id, known.error.message if known.error is not None else ""))
            end += len(line)
        self._file.seek(0, os.SEEK_END)
        if self._file.tell() > end:
            self._file.truncate(end)


def _key(custom_id: str | None, problem: str) -> str:
    return f"id:{custom_id}" if custom_id is not None else f"problem:{problem}"
