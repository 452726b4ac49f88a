"""The builds of the CPU library that this processor can run."""

from __future__ import annotations

from serve.kernels.cpu import binding


def runnable_variants() -> list[tuple[str, int]]:
    portable = binding.FOLDER / f"serve_cpu_{binding.PORTABLE}.so"
    if not portable.exists():
        return []
    level = binding.open_library(portable).serve_cpu_level()
    built = [v for v in binding.VARIANTS if (binding.FOLDER / f"serve_cpu_{v[0]}.so").exists()]
    return [variant for variant in built if variant[1] <= level]


VARIANTS = runnable_variants()
