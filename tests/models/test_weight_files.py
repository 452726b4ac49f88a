"""Safetensors files and the check of names and shapes: sharded, missing, extra, misshaped and damaged."""

from __future__ import annotations

import json
import random
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.errors import ConfigError, ExitCode
from serve.models.weights.safetensors import SafetensorsSource
from tests.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.models.harness import PagedRunner, load

PROMPT = [(i * 37 + 11) % VOCAB_SIZE for i in range(20)]


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert caught.value.exit_code == ExitCode.MODEL
    return str(caught.value)


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a written model."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


def test_sharded_weights_give_the_same_logits(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "one", "qwen2")
    many = write_checkpoint(tmp_path / "many", "qwen2", max_shard_size="100KB")
    assert len(list(many.glob("model-*.safetensors"))) > 1
    assert torch.equal(PagedRunner(load(many)).prefill(PROMPT), PagedRunner(load(one)).prefill(PROMPT))


def test_missing_parameters_are_counted_and_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    rewrite(folder, {"model.layers.2.mlp.up_proj.weight": None, "lm_head.weight": None})
    # 3 layers of 9 parameters, embedding, final norm, head.
    expected = "checkpoint lacks 2 of 30 parameters: model.layers.2.mlp.up_proj.weight, lm_head.weight"
    assert expected in refusal(folder)


def test_misshaped_parameter_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    rewrite(folder, {"model.norm.weight": torch.ones(47)})
    assert "model.norm.weight is [47], expected [48]" in refusal(folder)


def test_tensors_that_do_not_belong_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    rewrite(folder, {"model.layers.0.self_attn.q_proj.bias": torch.ones(72), "model.visual.x": torch.ones(2)})
    message = refusal(folder)
    assert "checkpoint has 2 tensors that the architecture does not" in message
    assert "model.layers.0.self_attn.q_proj.bias" in message
    assert "model.visual.x" in message


def test_saved_rotary_buffers_and_a_copy_of_the_tied_head_are_tolerated(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=True)
    before = PagedRunner(load(folder)).prefill(PROMPT)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(
        folder,
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6), "lm_head.weight": embedding.clone()},
    )
    assert torch.equal(PagedRunner(load(folder)).prefill(PROMPT), before)


def test_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(48)}, folder / "b.safetensors")
    assert "is also in another file" in refusal(folder)


def test_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    rewrite(folder, {"model.norm.weight": torch.ones(48, dtype=torch.int32)})
    assert "'model.norm.weight' has type I32; supported: F64, F32, F16, BF16" in refusal(folder)


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def described(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "header claims 0 bytes"),
        (file_of({}, length=1 << 60), "header claims 1152921504606846976 bytes of a file of 10"),
        (file_of(b"{nope"), "is not JSON"),
        (file_of(b"[1]"), "is not an object"),
        (file_of({"t": 1}), "has no description"),
        (file_of(described(dtype=["F32"]), bytes(8)), "has type"),
        (file_of(described(shape=[-2]), bytes(8)), "has shape [-2]"),
        (file_of(described(shape=[1 << 62, 1 << 62]), bytes(8)), "has 8 bytes"),
        (file_of(described(offsets=[8, 0]), bytes(8)), "has -8 bytes"),
        (file_of(described(offsets=[0]), bytes(8)), "offsets [0]"),
        (file_of(described(offsets=[1 << 60, (1 << 60) + 8]), bytes(8)), "of a file of"),
        (file_of(described(), bytes(7)), "of a file of"),
    ],
)
def test_damaged_file_is_refused_with_its_reason(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        SafetensorsSource([str(path)])
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)


def test_unaligned_data_is_read_all_the_same(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.25])
    header = json.dumps(described()).encode()
    header += b" " * (1 + (-len(header) % 8))
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of(header, values.numpy().tobytes()))
    source = SafetensorsSource([str(path)])
    out = torch.empty(2)
    source.read("t", out)
    assert torch.equal(out, values)
    assert source.mapped("t", torch.float32) is None


def test_damaged_headers_are_refused_quickly_and_never_crash(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    (header_length,) = struct.unpack("<Q", whole[:8])
    random_ = random.Random(3)
    num_refused, slowest = 0, 0.0
    for _ in range(300):
        mutant = bytearray(whole)
        for _ in range(random_.randint(1, 3)):
            mutant[random_.randrange(header_length + 8)] = random_.randrange(256)
        path.write_bytes(mutant)
        begin = time.process_time()
        try:
            load(folder)
        except ConfigError:
            num_refused += 1
        slowest = max(slowest, time.process_time() - begin)
    assert num_refused > 250
    assert slowest < 1.0
