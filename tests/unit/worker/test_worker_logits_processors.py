"""The plug-in seam: loading, row bookkeeping, order, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from serve.errors import ConfigError
from serve.sampling_params import SamplingParams
from serve.worker.logits_processors import BatchUpdate, ProcessorChain, ProcessorRequest, load_processors
from tests.fakes_worker import ScriptedModel, StepDriver

VOCAB = 61
GREEDY = SamplingParams(temperature=0.0)
HERE = "tests.unit.worker.test_worker_logits_processors"


class ForceToken:
    """Makes each request that names a token in extra_args generate it, following rows as a plug-in must."""

    invariant = False

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, list[int]]] = {}
        self.updates: list[BatchUpdate | None] = []
        self.outputs_seen: list[list[int]] = []

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if (params.extra_args or {}).get("force") == "bad":
            raise ValueError("force must be a token id")

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for added in batch_update.added:
            token = (added.params.extra_args or {}).get("force")
            if isinstance(token, int):
                self.rows[added.row] = (token, added.output_token_ids)
        for source, target in batch_update.moved:
            self.rows.pop(target, None)
            if source in self.rows:
                self.rows[target] = self.rows.pop(source)
        assert all(row < batch_update.batch_size for row in self.rows)

    def apply(self, logits: Tensor) -> Tensor:
        for row, (token, output_token_ids) in self.rows.items():
            self.outputs_seen.append(list(output_token_ids))
            logits[row, token] = 1000.0
        return logits


class Doubled(ForceToken):
    """Argmax-invariant, and gives a new tensor instead of changing the old one."""

    invariant = True

    def apply(self, logits: Tensor) -> Tensor:
        return logits * 1000.0


class Incomplete:
    def apply(self, logits: Tensor) -> Tensor:
        return logits


def forced(token: int | str) -> SamplingParams:
    return SamplingParams(temperature=0.0, extra_args={"force": token})


def test_processor_follows_its_requests_through_every_change_of_the_batch() -> None:
    processor = ForceToken()
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB, processors=[processor])
    plain = StepDriver(ScriptedModel(VOCAB), VOCAB)
    rng = np.random.default_rng(3)
    forced_tokens: dict[str, int] = {}
    for step in range(120):
        if len(driver.requests) < 8 and rng.random() < 0.5:
            name, prompt = f"r{step}", rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist()
            is_forced = rng.random() < 0.5
            forced_tokens[name] = int(rng.integers(0, VOCAB)) if is_forced else -1
            driver.add(name, prompt, forced(forced_tokens[name]) if is_forced else GREEDY)
            plain.add(name, prompt, GREEDY)
        names = list(driver.requests)
        if names and rng.random() < 0.25:
            gone = names[int(rng.integers(len(names)))]
            if rng.random() < 0.5:
                driver.preempt(gone)
            else:
                driver.finish(gone)
                plain.finish(gone)
        chosen = [name for name in driver.requests if rng.random() < 0.8]
        rng.shuffle(chosen)
        output = driver.step(
            {
                name: min(6, len(driver.requests[name].token_ids) - driver.requests[name].num_computed_tokens)
                for name in chosen
            }
        )
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if tokens and forced_tokens[name] >= 0:
                assert tokens == [forced_tokens[name]]
    for name, request in driver.requests.items():
        if forced_tokens[name] < 0:
            while len(plain.output_of(name)) < len(driver.output_of(name)):
                todo = plain.requests[name]
                plain.step({name: len(todo.token_ids) - todo.num_computed_tokens})
            assert (
                plain.output_of(name)[: len(driver.output_of(name))] == request.token_ids[request.num_prompt_tokens :]
            )


def test_processor_sees_the_growing_output() -> None:
    processor = ForceToken()
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB, processors=[processor])
    driver.add("a", [1, 2], forced(9))
    for _ in range(3):
        driver.step_all()
    assert processor.outputs_seen == [[], [9], [9, 9]]


def test_processor_is_told_only_of_changes() -> None:
    processor = ForceToken()
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB, processors=[processor])
    driver.add("a", [1, 2], GREEDY)
    driver.step_all()
    driver.step_all()
    assert processor.updates[0] is not None
    assert [added.row for added in processor.updates[0].added] == [0]
    assert processor.updates[0].added[0].prompt_token_ids == [1, 2]
    assert processor.updates[1] is None


def test_last_row_moves_into_a_hole() -> None:
    processor = ForceToken()
    chain = ProcessorChain([processor])
    for name in "abcd":
        chain.admit(name, ProcessorRequest(GREEDY, [1], []))
    assert chain.arrange(list("abcd")) == list("abcd")
    chain.forget("b")
    assert chain.arrange(list("acd")) == list("adc")
    assert processor.updates[-1] == BatchUpdate(batch_size=3, removed=[1], added=[], moved=[(3, 1)])


def test_argmax_invariant_processor_changes_draws_but_not_greedy_rows() -> None:
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB, processors=[Doubled()])
    greedy = StepDriver(ScriptedModel(VOCAB), VOCAB)
    driver.add("greedy", [1, 2, 3], GREEDY)
    driver.add("random", [1, 2, 3], SamplingParams(temperature=1.0, seed=1))
    greedy.add("a", [1, 2, 3], GREEDY)
    for _ in range(10):
        driver.step_all()
        greedy.step_all()
    # Logits times 1000 leave the draw no choice.
    assert driver.output_of("greedy") == driver.output_of("random") == greedy.output_of("a")


def test_penalties_act_on_what_a_processor_gives() -> None:
    class Equal(ForceToken):
        def apply(self, logits: Tensor) -> Tensor:
            return torch.ones_like(logits)

    driver = StepDriver(ScriptedModel(VOCAB), VOCAB, processors=[Equal()])
    driver.add("a", [0, 1, 2], SamplingParams(temperature=0.0, presence_penalty=1.0))
    for _ in range(4):
        driver.step_all()
    # Equal logits: the smallest id that was not generated yet.
    assert driver.output_of("a") == [0, 1, 2, 3]


def test_refused_parameters_fail_that_request_only() -> None:
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB, processors=[ForceToken()])
    driver.add("bad", [1, 2, 3], forced("bad"))
    driver.add("good", [1, 2, 3], GREEDY)
    output = driver.step_all()
    assert output.errors == {"bad": "invalid_request: force must be a token id"}
    assert [len(tokens) for tokens in output.sampled_token_ids] == [0, 1]


def test_processor_that_leaves_nan_fails_the_row() -> None:
    class Nan(ForceToken):
        def apply(self, logits: Tensor) -> Tensor:
            logits[0] = torch.nan
            return logits

    driver = StepDriver(ScriptedModel(VOCAB), VOCAB, processors=[Nan()])
    driver.add("a", [1, 2, 3], GREEDY)
    driver.add("b", [1, 2, 3], GREEDY)
    output = driver.step_all()
    assert list(output.errors) == ["a"]
    assert [len(tokens) for tokens in output.sampled_token_ids] == [0, 1]


def test_import_path_loads_the_class() -> None:
    loaded = load_processors((f"{HERE}:ForceToken",))
    assert [type(processor).__name__ for processor in loaded] == ["ForceToken"]


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no_colon", "module:Class"),
        (":Class", "module:Class"),
        ("no_such_module_of_ours:Class", "cannot be imported"),
        (f"{HERE}:Missing", "no class 'Missing'"),
        (f"{HERE}:VOCAB", "no class 'VOCAB'"),
        (f"{HERE}:Incomplete", "lacks validate_params, is_argmax_invariant, update_state"),
    ],
)
def test_bad_import_path_is_refused_at_start(path: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_processors((path,))
    assert path in str(caught.value)
