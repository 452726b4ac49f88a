"""How many threads compute, and where they run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from serve.config import DeviceConfig
from serve.cpus import keep_process_on, parse_cpu_list, tie_thread, usable_set, write_cpu_list
from serve.kernels import ops
from serve.worker.host import count_cores, usable_cpus

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """num_threads that compute, the calling one included; the processors they are tied to, if any; why so many."""

    num_threads: int
    cpus: tuple[int, ...]
    reason: str


def plan_threads(config: DeviceConfig, *, num_cpus: int, num_cores: int) -> ThreadPlan:
    """Choose the threads of a machine.

    num_cpus is what this process may use at once, num_cores how many cores these processors belong to. Two processors
    of one core share its arithmetic, so that only one of them gets a thread. The front end needs a processor of its
    own where there are more than two; two are best shared.
    """
    cpus = () if config.cpu_affinity is None else parse_cpu_list(config.cpu_affinity)
    if config.cpu_threads is not None:
        return ThreadPlan(config.cpu_threads, cpus, "--cpu-threads")
    if cpus:
        return ThreadPlan(len(cpus), cpus, "one for each of --cpu-affinity")
    if num_cores < num_cpus:
        return ThreadPlan(num_cores, (), "one a core, whose second processor is left to the front end")
    if num_cpus > 2:
        return ThreadPlan(num_cpus - 1, (), "one processor is left to the front end")
    return ThreadPlan(num_cpus, (), "all processors, which the front end shares")


def start_threads(config: DeviceConfig, *, pool_computes: bool) -> int:
    """Start the threads that share the calling one's work and tie them where asked; gives how many compute.

    pool_computes: the kernels' own pool does the work, else torch's. Never both: a second pool that spins between the
    operations of the first would only fight with it.
    """
    usable = usable_set()
    num_cpus = min(usable_cpus(), torch.get_num_threads())
    plan = plan_threads(config, num_cpus=num_cpus, num_cores=min(num_cpus, count_cores(usable)))
    torch.set_num_threads(1 if pool_computes else plan.num_threads)
    ops.set_num_threads(plan.num_threads)
    if plan.cpus:
        keep_process_on(plan.cpus)
        tie_thread(plan.cpus[0])
        ops.pin_helpers(plan.cpus[1 : plan.num_threads])
    where = f"tied to processors {write_cpu_list(plan.cpus)}" if plan.cpus else f"processors={write_cpu_list(usable)}"
    log.info("threads=%d %s: %s", plan.num_threads, where, plan.reason)
    if not plan.cpus and plan.num_threads > usable_cpus():
        log.warning(
            "--cpu-threads %d share %d processors and will wait for each other; lower it to at most that",
            plan.num_threads,
            usable_cpus(),
        )
    return plan.num_threads
