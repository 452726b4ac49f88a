"""Decoders run by one call of the library: the same bits as op by op, for every architecture."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from serve.kernels import ops
from serve.models.llama import LlamaModel
from tests.checkpoints import write_checkpoint, write_gguf
from tests.models.harness import PagedRunner, load
from tests.models.test_architectures import CASES, PROMPT
from tests.models.test_gguf_weights import SIZES

needs_library = pytest.mark.skipif(
    not ops.packs("cpu", torch.float32), reason="without the compiled kernels every model runs op by op"
)
STEPS = (
    {"a": PROMPT[:1], "b": PROMPT[1:40], "c": PROMPT[40:57]},
    {"b": [3], "a": PROMPT[5:9], "c": [4]},
    {"a": [1], "b": [2], "c": [3], "d": PROMPT},
)


def assert_same_steps(model: LlamaModel) -> None:
    one_call, single_ops = PagedRunner(model), PagedRunner(model.op_by_op())
    for step in STEPS:
        actual, expected = one_call.step(step), single_ops.step(step)
        assert all(torch.equal(actual[name], expected[name]) for name in step)


@needs_library
@pytest.mark.parametrize("case", [name for name in CASES if "rope" not in name])
def test_one_call_gives_the_bits_of_single_ops(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    model = load(write_checkpoint(tmp_path / "model", family, **changes))
    assert isinstance(model, LlamaModel)
    assert_same_steps(model)


@needs_library
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_one_call_gives_the_bits_of_single_ops_on_quantised_weights(tmp_path: Path, family: str) -> None:
    write_gguf(tmp_path / "m.gguf", family, kind=gguf.GGMLQuantizationType.Q4_1, **SIZES)
    model = load(tmp_path / "m.gguf")
    assert isinstance(model, LlamaModel)
    assert_same_steps(model)
