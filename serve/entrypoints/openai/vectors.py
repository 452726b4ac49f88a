"""Writes numbers the way a client asked for: JSON numbers, base64 of their bytes, or bytes."""

from __future__ import annotations

import base64
import sys

import msgspec
import numpy as np
from fastapi.responses import Response

from serve.entrypoints.openai.generation import Generation
from serve.entrypoints.openai.pooling_job import Pooled, json_reply, pooling_usage
from serve.entrypoints.openai.pooling_protocol import InputRequest
from serve.errors import InvalidRequest

# Clients and proxies refuse longer heads.
_MAX_METADATA_BYTES = 16 << 10


def vector_reply(generation: Generation, body: InputRequest, results: list[Pooled], *, kind: str, key: str) -> Response:
    """Give the answer with one entry for each result; kind is its object's name, key where its numbers are."""
    usage = pooling_usage(results)
    if body.encoding_format in ("bytes", "bytes_only"):
        return _bytes_reply(generation, body, results, usage)
    data = [
        {"index": index, "object": kind, key: _numbers(result.values, body)} for index, result in enumerate(results)
    ]
    return json_reply(generation, {"data": data, "usage": usage})


def _numbers(values: np.ndarray, body: InputRequest) -> object:
    if body.encoding_format == "base64":
        return base64.b64encode(to_bytes(values, body.embed_dtype, body.endianness)).decode()
    return values.tolist()


def to_bytes(values: np.ndarray, dtype: str, endianness: str) -> bytes:
    """Give float32 numbers as the bytes of a type, in row order; native is this machine's own order of bytes."""
    order = {"little": "<", "big": ">", "native": "<" if sys.byteorder == "little" else ">"}[endianness]
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
        # The upper half of a float32, rounded to nearest, ties to even.
        halves = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
        return halves.astype(f"{order}u2").tobytes()
    return values.astype(f"{order}f2" if dtype == "float16" else f"{order}f4").tobytes()


def _bytes_reply(
    generation: Generation, body: InputRequest, results: list[Pooled], usage: dict[str, object]
) -> Response:
    """Give all vectors as bytes one after the other; for "bytes" the header metadata tells where each is."""
    parts = [to_bytes(result.values, body.embed_dtype, body.endianness) for result in results]
    headers = {}
    if body.encoding_format == "bytes":
        data, end = [], 0
        for index, (part, result) in enumerate(zip(parts, results, strict=True)):
            start, end = end, end + len(part)
            data.append(
                {
                    "index": index,
                    "embed_dtype": body.embed_dtype,
                    "endianness": body.endianness,
                    "start": start,
                    "end": end,
                    "shape": list(result.values.shape),
                }
            )
        head = {"id": generation.response_id, "created": generation.created, "model": generation.model}
        metadata = msgspec.json.encode({**head, "data": data, "usage": usage})
        if len(metadata) > _MAX_METADATA_BYTES:
            raise InvalidRequest(
                f"encoding_format bytes describes {len(results)} results in {len(metadata)} bytes of a header, the "
                f"limit is {_MAX_METADATA_BYTES}; send fewer inputs or use bytes_only",
                param="encoding_format",
            )
        headers["metadata"] = metadata.decode("ascii", "backslashreplace")
    return Response(b"".join(parts), headers=headers, media_type="application/octet-stream")
