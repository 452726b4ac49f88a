"""How many threads compute on which machine, and that the worker starts them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from serve.config import DeviceConfig
from serve.kernels import ops
from serve.worker.host import usable_cpus
from serve.worker.threads import ThreadPlan, plan_threads, start_threads


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield None
    torch.set_num_threads(before)
    ops.set_num_threads(1)


@pytest.mark.parametrize(
    ("num_cpus", "num_cores", "num_threads"),
    [(1, 1, 1), (2, 2, 2), (2, 1, 1), (3, 3, 2), (8, 8, 7), (8, 4, 4), (128, 64, 64)],
)
def test_default_leaves_the_front_end_a_processor_where_there_are_enough(
    num_cpus: int, num_cores: int, num_threads: int
) -> None:
    plan = plan_threads(DeviceConfig(), num_cpus=num_cpus, num_cores=num_cores)
    assert (plan.num_threads, plan.cpus) == (num_threads, ())


def test_flags_decide_where_they_are_given() -> None:
    def plan(threads: int | None, affinity: str | None) -> ThreadPlan:
        return plan_threads(DeviceConfig(threads, affinity), num_cpus=8, num_cores=8)

    assert plan(3, None) == ThreadPlan(3, (), "--cpu-threads")
    assert plan(None, "4-6,1") == ThreadPlan(4, (4, 5, 6, 1), "one for each of --cpu-affinity")
    assert plan(2, "4-6") == ThreadPlan(2, (4, 5, 6), "--cpu-threads")


@pytest.mark.parametrize("pool_computes", [True, False])
def test_only_one_of_the_two_pools_gets_threads(
    pool_computes: bool, threads_restored: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert start_threads(DeviceConfig(cpu_threads=2), pool_computes=pool_computes) == 2
    assert torch.get_num_threads() == (1 if pool_computes else 2)
    assert "threads=2 processors=" in caplog.text
    assert "--cpu-threads" in caplog.text


def test_more_threads_than_processors_are_warned_of(threads_restored: None, caplog: pytest.LogCaptureFixture) -> None:
    too_many = usable_cpus() + 1
    assert start_threads(DeviceConfig(cpu_threads=too_many), pool_computes=True) == too_many
    assert f"--cpu-threads {too_many} share" in caplog.text
