"""Prompts given as embeddings: the two forms, their types, and everything that is not one of them."""

from __future__ import annotations

import base64
import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save

from serve.engine.prompt_embeds import decode_all, decode_prompt_embeds
from serve.errors import InvalidRequest

ROWS = np.array([[1.5, -2.0, 0.25], [3.0, 1e-3, -0.0]], dtype=np.float32)


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def raw(dtype: str = "float32", shape: object = (2, 3), data: bytes = ROWS.tobytes()) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data": encode(data)}


def safetensors(header: object, data: bytes = b"") -> str:
    text = json.dumps(header).encode()
    return encode(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 3)])
def test_a_safetensors_file_gives_the_tensor_it_was_made_of(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.from_numpy(ROWS).to(dtype).reshape(shape)
    rows = decode_prompt_embeds(encode(save({"anything": tensor})), 3, param="prompt_embeds").rows
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, tensor.reshape(2, 3).float().numpy())


@pytest.mark.parametrize(("dtype", "kind"), [("float32", torch.float32), ("torch.bfloat16", torch.bfloat16)])
def test_a_raw_array_beside_its_shape_gives_its_values(dtype: str, kind: torch.dtype) -> None:
    tensor = torch.from_numpy(ROWS).to(kind)
    sent = raw(dtype, data=tensor.view(torch.uint8).numpy().tobytes())
    np.testing.assert_array_equal(decode_prompt_embeds(sent, 3, param="x").rows, tensor.float().numpy())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("!!", "not base64"),
        (encode(b""), "not a safetensors file"),
        (encode(b"\x80\x02}q\x00."), "not a safetensors file"),
        (encode(struct.pack("<Q", 1 << 60) + b"{}"), "not a safetensors file"),
        (safetensors([]), "cannot be read"),
        (safetensors({}), "holds 0 tensors"),
        (safetensors({"a": {"dtype": "F32", "shape": [1, 3], "data_offsets": [0, 12]}}), "shorter than its header"),
        (safetensors({"a": {"dtype": "F32", "shape": [1, 3], "data_offsets": [8, 4]}}, b"0" * 12), "shorter"),
        (safetensors({"a": {"dtype": "I64", "shape": [1, 3], "data_offsets": [0, 24]}}, b"0" * 24), "'I64' is not one"),
        (raw(shape=(2, 4)), "does not fill"),
        (raw(shape=(-2, -3)), "does not fill"),
        (raw(shape=(1 << 40, 1 << 40)), "does not fill"),
        (raw(shape=()), "does not fill"),
        (raw(shape=(1, 1, 1, 2, 3)), "does not fill"),
        (raw(shape="2x3"), "cannot be read"),
        (raw(dtype="object"), "'object' is not one"),
        (raw(shape=(3, 2)), r"shape \[3, 2\]; this model takes \[tokens, 3\]"),
        (raw(shape=(2, 1, 3)), r"shape \[2, 1, 3\]"),
        (raw(shape=(0, 3), data=b""), r"shape \[0, 3\]"),
        (raw(data=np.array([[np.nan] * 3, [0] * 3], dtype=np.float32).tobytes()), "NaN or infinity"),
        (raw(data=np.array([[np.inf] * 3, [0] * 3], dtype=np.float32).tobytes()), "NaN or infinity"),
        (7, "cannot be read"),
        ({"dtype": "float32"}, "cannot be read"),
    ],
)
def test_what_is_no_embedding_of_this_model_is_refused(value: object, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as refusal:
        decode_prompt_embeds(value, 3, param="prompt_embeds.4")
    assert refusal.value.param == "prompt_embeds.4"


def test_a_list_gives_one_prompt_for_each_and_names_the_wrong_one() -> None:
    assert [len(prompt) for prompt in decode_all([raw(), encode(save({"a": torch.ones(5, 3)}))], 3)] == [2, 5]
    assert [len(prompt) for prompt in decode_all(raw(), 3)] == [2]
    with pytest.raises(InvalidRequest) as refusal:
        decode_all([raw(), "!!"], 3)
    assert refusal.value.param == "prompt_embeds.1"
    with pytest.raises(InvalidRequest, match="empty list"):
        decode_all([], 3)


def test_a_server_without_the_flag_takes_none() -> None:
    with pytest.raises(InvalidRequest, match="--enable-prompt-embeds"):
        decode_all(raw(), None)
