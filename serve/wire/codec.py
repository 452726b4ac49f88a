"""Typed msgpack encoders and decoders; arrays travel as (dtype, shape, inline bytes or index of an extra frame).

A message is a list of frames: the msgpack payload, then one frame per large array. Encoders and decoders are cheap
to keep and not thread-safe: one per thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

log = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview
Frame = bytes | memoryview

INLINE_LIMIT: Final = 256  # bytes; smaller arrays ride inside the payload
_INLINE_CODE: Final = 3
_MAX_DIMS: Final = 8
_ERROR_LOG_PERIOD: Final = 1.0
_DTYPES: Final = {name: np.dtype(name) for name in ("<i4", "<i8", "<u4", "<f4", "<f8", "<f2", "|i1", "|u1", "|b1")}

T = TypeVar("T")


class WireError(Exception):
    """A message that cannot be decoded (or, on our own side, encoded); the receiver drops it and goes on."""


class WireErrors:
    """Counts the messages a receiver had to drop; logs at most one a second, so that a flood of junk stays cheap."""

    def __init__(self, sender: str) -> None:
        self.count = 0
        self._sender = sender
        self._last_logged = -_ERROR_LOG_PERIOD

    def report(self, error: WireError) -> None:
        """Count one."""
        self.count += 1
        now = time.monotonic()
        if now - self._last_logged >= _ERROR_LOG_PERIOD:
            self._last_logged = now
            log.error("dropped a message of %s: total=%d error=%s", self._sender, self.count, error)


class MsgpackEncoder:
    """Turns message structs into frames."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)
        self._aux: list[Frame] = []

    def encode(self, message: object) -> list[Frame]:
        """Give the frames of a message: payload first. Raises WireError for arrays of a dtype not on the list."""
        self._aux = []
        payload = self._encoder.encode(message)
        frames = [payload, *self._aux]
        self._aux = []
        return frames

    def _encode_array(self, value: object) -> object:
        if not isinstance(value, np.ndarray):
            raise WireError(f"type {type(value).__name__} does not go over the wire")
        dtype = value.dtype.str
        if dtype not in _DTYPES:
            raise WireError(f"arrays of dtype {dtype} do not go over the wire; allowed: {', '.join(_DTYPES)}")
        data: msgspec.msgpack.Ext | int
        if value.nbytes < INLINE_LIMIT:
            data = msgspec.msgpack.Ext(_INLINE_CODE, value.tobytes())
        else:
            # A flat byte view keeps the array alive until the frame is sent; strided arrays are copied first.
            self._aux.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            data = len(self._aux)
        return (dtype, value.shape, data)


class MsgpackDecoder(Generic[T]):
    """Turns frames into objects of one type; everything else is a WireError.

    Arrays are views of the received frames where possible and must not be written to.
    """

    def __init__(self, message_type: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type, dec_hook=self._decode_array, ext_hook=_decode_ext)
        self._frames: Sequence[Buffer] = ()

    def decode(self, frames: Buffer | Sequence[Buffer]) -> T:
        """Give the message in the frames (or in one payload). Raises WireError on any other content."""
        if isinstance(frames, bytes | bytearray | memoryview):
            frames = (frames,)
        if not frames:
            raise WireError("message without a frame")
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise WireError(f"undecodable message: {error}") from error
        finally:
            self._frames = ()

    def _decode_array(self, wanted: type, value: Any) -> object:
        if wanted is not np.ndarray:
            raise WireError(f"type {wanted.__name__} does not come over the wire")
        if type(value) is not list or len(value) != 3:
            raise ValueError("array is not [dtype, shape, data]")
        name, shape, data = value
        dtype = _DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise ValueError(f"array dtype {name!r} is not allowed")
        buffer = self._array_data(data)
        if type(shape) is not list or len(shape) > _MAX_DIMS:
            raise ValueError("array shape is not a list of at most 8 lengths")
        size = dtype.itemsize
        for length in shape:
            if type(length) is not int or length < 0:
                raise ValueError("array shape holds something else than lengths")
            size *= length
        nbytes = buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
        if size != nbytes:
            raise ValueError(f"array of shape {shape} and dtype {name} does not fill {nbytes} bytes")
        return np.ndarray(shape, dtype, buffer)

    def _array_data(self, data: object) -> Buffer:
        if isinstance(data, memoryview):
            return data
        if type(data) is not int or not 1 <= data < len(self._frames):
            raise ValueError("array data is neither inline bytes nor the index of a frame")
        return self._frames[data]


def _decode_ext(code: int, data: memoryview) -> memoryview:
    if code != _INLINE_CODE:
        raise ValueError(f"extension type {code} is not used")
    return data
