"""The implementations that the kernel tests run: the plain twin and each library this processor can load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from serve.kernels import ops, reference
from serve.kernels.cpu import binding
from serve.kernels.cpu import ops as cpu_ops
from serve.kernels.ops import Ops
from tests.kernels.variants import VARIANTS


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[name for name, _ in VARIANTS])
def library_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """The CPU library's ops, once for each build that this processor runs."""
    monkeypatch.setattr(binding, "VARIANTS", tuple(v for v in VARIANTS if v[0] == request.param))
    binding.load_library.cache_clear()
    binding.set_num_threads(1)
    yield cpu_ops
    binding.set_num_threads(1)
    binding.load_library.cache_clear()


@pytest.fixture(params=["twin", *(name for name, _ in VARIANTS)])
def every_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """Every implementation, the plain twin included."""
    if request.param == "twin":
        yield reference
        return
    monkeypatch.setattr(binding, "VARIANTS", tuple(v for v in VARIANTS if v[0] == request.param))
    binding.load_library.cache_clear()
    yield cpu_ops
    binding.load_library.cache_clear()


@pytest.fixture
def threads_restored() -> Iterator[None]:
    """For tests that change the number of threads."""
    yield None
    ops.set_num_threads(1)
