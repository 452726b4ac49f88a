"""A logits processor that raises inside the engine core once a file exists: a bug in plugged-in code."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from serve.sampling_params import SamplingParams
from serve.worker.logits_processors import BatchUpdate

SWITCH = "SERVE_TEST_FAIL_SWITCH"


class FailingProcessor:
    """Does nothing until the file named by the environment exists, then raises in apply()."""

    def __init__(self) -> None:
        self._switch = Path(os.environ[SWITCH])

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Accept everything."""

    def is_argmax_invariant(self) -> bool:
        """Say that greedy rows may change too, so that apply() is always called."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keep nothing."""

    def apply(self, logits: Tensor) -> Tensor:
        """Raise when switched on."""
        if self._switch.exists():
            raise RuntimeError("first line of the failure\nsecond line of the failure")
        return logits
