"""The runner over real paged attention and over a scripted model: batches, chunks, preemption, failures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve.sampling_params import SamplingParams
from serve.wire.frontend import LogprobsLists
from tests.fakes_worker import ScriptedModel, StepDriver, TinyAttentionModel

VOCAB = 61
GREEDY = SamplingParams(temperature=0.0)
# One token, around a block edge, around two blocks, and no special length.
LENGTHS = (1, 15, 16, 17, 33, 40)


@pytest.fixture(scope="module")
def model() -> TinyAttentionModel:
    torch.set_num_threads(1)
    return TinyAttentionModel(VOCAB)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(1000 * seed + length).integers(0, VOCAB, length)]


def test_batch_of_whole_prompts_continues_like_the_dense_model(model: TinyAttentionModel) -> None:
    driver = StepDriver(model, VOCAB)
    for length in LENGTHS:
        driver.add(f"r{length}", prompt_of(length), GREEDY)
    for _ in range(20):
        driver.step_all()
    for length in LENGTHS:
        assert driver.output_of(f"r{length}") == model.greedy(prompt_of(length), 20)


@pytest.mark.parametrize("chunk", [1, 5, 16, 17])
def test_prompt_in_chunks_gives_the_tokens_of_the_whole_prompt(model: TinyAttentionModel, chunk: int) -> None:
    driver = StepDriver(model, VOCAB)
    driver.add("long", prompt_of(40), GREEDY)
    while len(driver.output_of("long")) < 6:
        driver.step_all(chunk)
    assert driver.output_of("long") == model.greedy(prompt_of(40), 6)


def test_prefill_beside_decodes_changes_neither(model: TinyAttentionModel) -> None:
    driver = StepDriver(model, VOCAB)
    driver.add("a", prompt_of(17), GREEDY)
    driver.step_all()
    driver.add("b", prompt_of(40), GREEDY)
    for _ in range(8):
        driver.step_all(chunk=9)
    assert driver.output_of("a") == model.greedy(prompt_of(17), 9)
    assert driver.output_of("b") == model.greedy(prompt_of(40), len(driver.output_of("b")))
    assert len(driver.output_of("b")) == 4


def test_partial_prefill_gives_no_token_and_computes_no_logits() -> None:
    model = ScriptedModel(VOCAB)
    driver = StepDriver(model, VOCAB)
    driver.add("a", prompt_of(10), GREEDY)
    output = driver.step({"a": 9})
    assert (output.req_ids, output.sampled_token_ids) == (["a"], [[]])
    assert model.num_logits_rows == []
    assert len(driver.step({"a": 1}).sampled_token_ids[0]) == 1
    assert model.num_logits_rows == [1]


def test_only_requests_that_sample_get_logits() -> None:
    model = ScriptedModel(VOCAB)
    driver = StepDriver(model, VOCAB)
    driver.add("whole", prompt_of(10), GREEDY)
    driver.add("part", prompt_of(30), GREEDY)
    output = driver.step({"whole": 10, "part": 20})
    assert [len(tokens) for tokens in output.sampled_token_ids] == [1, 0]
    assert model.num_logits_rows == [1]


def test_output_follows_the_order_of_the_schedule() -> None:
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB)
    for name in "abc":
        driver.add(name, prompt_of(5, seed=ord(name)), GREEDY)
    first = driver.step({"a": 5, "b": 5, "c": 5})
    second = driver.step({"c": 1, "a": 1})
    assert (first.req_ids, second.req_ids) == (["a", "b", "c"], ["c", "a"])


def test_step_without_tokens_gives_an_empty_output_at_once() -> None:
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB)
    driver.add("a", prompt_of(5), GREEDY)
    driver.step_all()
    driver.finish("a")
    output = driver.runner.execute_model(driver.plan({}))
    assert output is not None
    assert (output.req_ids, output.sampled_token_ids) == ([], [])
    assert driver.runner.sample_tokens(None).req_ids == []


def test_second_execute_before_sampling_is_our_own_mistake() -> None:
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB)
    driver.add("a", prompt_of(5), GREEDY)
    driver.runner.execute_model(driver.plan({"a": 3}))
    with pytest.raises(AssertionError, match="again before sample_tokens"):
        driver.runner.execute_model(driver.plan({"a": 2}))


def test_rows_of_finished_requests_are_taken_by_new_ones(model: TinyAttentionModel) -> None:
    driver = StepDriver(model, VOCAB, max_num_seqs=2)
    for generation in range(5):
        for name in ("x", "y"):
            driver.add(f"{name}{generation}", prompt_of(12, seed=generation), GREEDY)
        for _ in range(3):
            driver.step_all()
        for name in ("x", "y"):
            assert driver.output_of(f"{name}{generation}") == model.greedy(prompt_of(12, seed=generation), 3)
            driver.finish(f"{name}{generation}")


SEEDED = SamplingParams(temperature=1.2, seed=77, top_p=0.95, frequency_penalty=0.4, repetition_penalty=1.1)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("same_step", [True, False])
def test_preempted_request_resumes_with_the_same_tokens(
    model: TinyAttentionModel, params: SamplingParams, same_step: bool
) -> None:
    undisturbed = StepDriver(model, VOCAB)
    undisturbed.add("a", prompt_of(17), params)
    driver = StepDriver(model, VOCAB)
    driver.add("a", prompt_of(17), params)
    driver.add("b", prompt_of(9), GREEDY)
    for _ in range(12):
        undisturbed.step_all()
    for _ in range(5):
        driver.step_all()
    driver.preempt("a")
    if not same_step:
        driver.step({"b": 1})
    while len(driver.output_of("a")) < 12:
        driver.step_all(chunk=7)
    assert driver.output_of("a") == undisturbed.output_of("a")


def test_seeded_request_does_not_depend_on_its_neighbours() -> None:
    alone = StepDriver(ScriptedModel(VOCAB), VOCAB)
    alone.add("a", prompt_of(6), SEEDED)
    crowd = StepDriver(ScriptedModel(VOCAB), VOCAB)
    crowd.add("n0", prompt_of(3), SamplingParams(temperature=1.0))
    crowd.add("n1", prompt_of(8), SamplingParams(temperature=0.0, logit_bias={3: 2.0}))
    crowd.add("a", prompt_of(6), SEEDED)
    crowd.add("n2", prompt_of(4), SamplingParams(top_k=3, min_p=0.1))
    for _ in range(30):
        alone.step_all()
        crowd.step_all()
    assert alone.output_of("a") == crowd.output_of("a")


def test_greedy_request_does_not_depend_on_random_neighbours() -> None:
    alone = StepDriver(ScriptedModel(VOCAB), VOCAB)
    alone.add("a", prompt_of(6), GREEDY)
    crowd = StepDriver(ScriptedModel(VOCAB), VOCAB)
    crowd.add("a", prompt_of(6), GREEDY)
    crowd.add("n", prompt_of(4), SamplingParams(temperature=2.0))
    for _ in range(30):
        alone.step_all()
        crowd.step_all()
    assert alone.output_of("a") == crowd.output_of("a")


def test_equal_seeds_give_equal_texts_and_other_seeds_other_ones() -> None:
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB)
    for name, seed in (("a", 5), ("b", 5), ("c", 6), ("d", -1)):
        driver.add(name, prompt_of(6), SamplingParams(temperature=1.5, seed=seed))
    for _ in range(20):
        driver.step_all()
    outputs = [driver.output_of(name) for name in "abcd"]
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs}) == 3


def test_partial_prefill_consumes_no_noise() -> None:
    whole = StepDriver(ScriptedModel(VOCAB), VOCAB)
    chunked = StepDriver(ScriptedModel(VOCAB), VOCAB)
    for driver in (whole, chunked):
        driver.add("a", prompt_of(20), SamplingParams(temperature=1.5, seed=8))
    for _ in range(10):
        whole.step_all()
    while len(chunked.output_of("a")) < 10:
        chunked.step_all(chunk=6)
    assert whole.output_of("a") == chunked.output_of("a")


def test_penalties_count_what_was_generated() -> None:
    vocab_size = 8
    model = ScriptedModel(vocab_size)
    model.table[:] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0])
    driver = StepDriver(model, vocab_size)
    driver.add("a", [7, 7], SamplingParams(temperature=0.0, frequency_penalty=1.5))
    for _ in range(6):
        driver.step_all()
    # 5 | 3.5 4 | 3.5 2.5 3 | 2 2.5 3 | 2 2.5 1.5 2 | 2 1 1.5 2: ties go to the lower id.
    assert driver.output_of("a") == [0, 1, 0, 2, 1, 0]


def test_request_with_nan_logits_fails_alone_and_may_be_scheduled_once_more() -> None:
    healthy = StepDriver(ScriptedModel(VOCAB), VOCAB)
    healthy.add("good", prompt_of(5), GREEDY)
    driver = StepDriver(ScriptedModel(VOCAB, poisoned=[60]), VOCAB)
    driver.add("bad", [1, 2, 60], GREEDY)
    driver.add("good", prompt_of(5), GREEDY)
    output = driver.step({"bad": 3, "good": 5})
    assert output.sampled_token_ids[0] == []
    assert output.errors["bad"].startswith("nan_logits: ")
    # With two steps in flight the scheduler has planned this one before it learns of the failure.
    stale = driver.step({"bad": 1, "good": 1})
    assert stale.sampled_token_ids[0] == []
    driver.finish("bad")
    driver.step({"good": 1})
    for _ in range(3):
        healthy.step_all()
    assert driver.output_of("good") == healthy.output_of("good")


def test_request_at_the_context_limit_may_be_scheduled_once_more() -> None:
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB, max_model_len=32)
    driver.add("a", prompt_of(31), GREEDY)
    driver.add("b", prompt_of(3), GREEDY)
    driver.step_all()
    assert len(driver.requests["a"].token_ids) == 32
    for _ in range(2):
        driver.step_all()
    alone = StepDriver(ScriptedModel(VOCAB), VOCAB)
    alone.add("b", prompt_of(3), GREEDY)
    for _ in range(3):
        alone.step_all()
    assert driver.output_of("b") == alone.output_of("b")


def test_logprobs_come_for_the_requests_that_asked() -> None:
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB)
    driver.add("a", prompt_of(4), SamplingParams(temperature=0.0, logprobs=2))
    driver.add("b", prompt_of(4), GREEDY)
    output = driver.step_all()
    assert list(output.logprobs) == ["a"]
    assert output.logprobs["a"].token_ids[0, 0] == output.sampled_token_ids[0][0]


def check_prompt_table(table: LogprobsLists, model: TinyAttentionModel, prompt: list[int], num_logprobs: int) -> None:
    """Compare with float64 log_softmax of the dense model at every prompt position but the last."""
    expected = torch.log_softmax(torch.from_numpy(model.dense_logits(prompt)), dim=-1).numpy()[:-1]
    actual = np.array(prompt[1:])
    assert table.token_ids.shape == (len(prompt) - 1, num_logprobs + 1)
    assert table.token_ids[:, 0].tolist() == prompt[1:]
    own = expected[np.arange(len(actual)), actual]
    np.testing.assert_allclose(table.logprobs[:, 0], own, atol=1e-3)
    assert table.sampled_ranks.tolist() == (expected >= own[:, None]).sum(axis=1).tolist()
    best = -np.sort(-expected, axis=1)[:, :num_logprobs]
    np.testing.assert_allclose(table.logprobs[:, 1:], best, atol=1e-3)


@pytest.mark.parametrize("chunk", [3, 16, 39, 512])
@pytest.mark.parametrize("num_logprobs", [0, 4, -1])
def test_prompt_logprobs_are_the_same_whole_and_in_chunks(
    model: TinyAttentionModel, chunk: int, num_logprobs: int
) -> None:
    prompt = prompt_of(40)
    driver = StepDriver(model, VOCAB)
    driver.add("other", prompt_of(5), GREEDY)
    driver.add("a", prompt, SamplingParams(temperature=0.0, prompt_logprobs=num_logprobs))
    tables = []
    while len(driver.output_of("a")) < 3:
        output = driver.step_all(chunk)
        tables += list(output.prompt_logprobs.items())
        assert bool(output.prompt_logprobs) == (len(driver.output_of("a")) == 1)
    assert [req_id for req_id, _ in tables] == ["a"]
    check_prompt_table(tables[0][1], model, prompt, VOCAB if num_logprobs == -1 else num_logprobs)


def test_prompt_logprobs_of_one_token_are_an_empty_table() -> None:
    driver = StepDriver(ScriptedModel(VOCAB), VOCAB)
    driver.add("a", [3], SamplingParams(temperature=0.0, prompt_logprobs=2))
    assert driver.step_all().prompt_logprobs["a"].token_ids.shape == (0, 3)


def test_prompt_logprobs_start_again_after_preemption_in_the_prefill(model: TinyAttentionModel) -> None:
    prompt = prompt_of(40)
    driver = StepDriver(model, VOCAB)
    driver.add("a", prompt, SamplingParams(temperature=0.0, prompt_logprobs=2))
    driver.step({"a": 20})
    driver.preempt("a")
    output = driver.step({"a": 40})
    check_prompt_table(output.prompt_logprobs["a"], model, prompt, 2)


def test_prompt_logprobs_are_not_sent_again_after_preemption_in_the_output(model: TinyAttentionModel) -> None:
    driver = StepDriver(model, VOCAB)
    driver.add("a", prompt_of(20), SamplingParams(temperature=0.0, prompt_logprobs=2))
    assert driver.step_all().prompt_logprobs
    driver.preempt("a")
    assert driver.step_all().prompt_logprobs == {}
    assert driver.output_of("a") == model.greedy(prompt_of(20), 2)


def test_nan_in_prompt_logits_fails_the_request() -> None:
    driver = StepDriver(ScriptedModel(VOCAB, poisoned=[60]), VOCAB)
    driver.add("a", [1, 60, 2], SamplingParams(temperature=0.0, prompt_logprobs=2))
    output = driver.step_all()
    assert output.errors["a"].startswith("nan_logits: ")
    assert output.sampled_token_ids == [[]]
