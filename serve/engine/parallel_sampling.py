"""Several choices of one client request: child requests, their seeds, and one stream of outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from serve.engine.outputs import CompletionOutput, PositionLogprobs
from serve.sampling_params import OutputKind, SamplingParams

_INT64_MIN: Final = -(2**63)
_INT64_SPAN: Final = 2**64


def num_children(params: SamplingParams) -> int:
    """Give how many engine requests a client request needs: one per choice, one in all when choices cannot differ."""
    return 1 if params.is_greedy else params.n


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Give the settings of one child: n = 1, and seed + index when there is a seed, wrapped to 64 bits.

    Prompt logprobs are the same for all children, so only the first computes them.
    """
    seed = params.seed
    if seed is not None:
        seed = (seed + index - _INT64_MIN) % _INT64_SPAN + _INT64_MIN
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    return msgspec.structs.replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)


class ParentRequest:
    """A client request with n > 1 choices.

    FINAL_ONLY keeps finished choices until the last one ends; the other kinds let every output pass.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.n = params.n
        self.num_generated: dict[int, int] = dict.fromkeys(range(params.n), 0)
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None  # waiting for the next hand-over
        self._is_copied = num_children(params) == 1
        self._is_final_only = params.output_kind == OutputKind.FINAL_ONLY
        self._num_unfinished = num_children(params)
        self._kept: list[CompletionOutput] = []

    @property
    def is_finished(self) -> bool:
        """True when every child has ended."""
        return self._num_unfinished == 0

    def fold(self, output: CompletionOutput, num_generated: int) -> list[CompletionOutput]:
        """Take a child's output; give the choices to hand over now, none while FINAL_ONLY waits."""
        outputs = self._copies(output) if self._is_copied else [output]
        for choice in outputs:
            self.num_generated[choice.index] = num_generated
        if output.finish_reason is not None:
            self._num_unfinished -= 1
        if not self._is_final_only:
            return outputs
        self._kept.extend(outputs)
        return sorted(self._kept, key=lambda choice: choice.index) if self.is_finished else []

    def _copies(self, output: CompletionOutput) -> list[CompletionOutput]:
        return [
            replace(
                output,
                index=index,
                token_ids=output.token_ids.copy(),
                logprobs=None if output.logprobs is None else output.logprobs.copy(),
            )
            for index in range(self.n)
        ]
