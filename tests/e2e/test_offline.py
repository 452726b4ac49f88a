"""LLM in a program: the server's answers, in order, with clear errors, and nothing left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from serve import LLM, SamplingParams, StructuredOutputs
from serve.errors import ConfigError, InvalidRequest
from tests.e2e.client import chat, choice_of, complete, post
from tests.e2e.server import Server
from tests.source_tree import ROOT
from tests.waiting import wait_until

LIMIT_S = 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [f"prompt number {i} " + "x" * (7 * i % 40) for i in range(40)]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    settings = {"kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 4, "max_model_len": 512}
    with LLM(str(tiny_model), enable_prompt_embeds=True, **settings) as made:
        yield made


def test_texts_and_ids_answer_in_order_like_the_server(llm: LLM, tiny: Server) -> None:
    outputs = llm.generate([*PROMPTS, [5, 6, 7]], GREEDY, use_tqdm=False)
    expected = [choice_of(complete(tiny, prompt, max_tokens=12)) for prompt in (*PROMPTS, [5, 6, 7])]
    assert [output.outputs[0].text for output in outputs] == [choice["text"] for choice in expected]
    assert [output.prompt for output in outputs] == [*PROMPTS, None]
    assert outputs[-1].prompt_token_ids == [5, 6, 7]


def test_conversations_answer_like_the_server(llm: LLM, tiny: Server) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(messages, GREEDY, use_tqdm=False)
    both = llm.chat([messages, [{"role": "user", "content": "bye"}]], GREEDY, use_tqdm=False)
    answer = choice_of(chat(tiny, "hello", max_tokens=12))
    assert one.outputs[0].text == both[0].outputs[0].text == answer["message"]["content"]  # type: ignore[index]
    assert one.prompt is not None
    assert one.prompt.startswith("<|im_start|>")


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, n=1, stop=["\x00none"]) for n in (1, 5, 3)]  # type: ignore[arg-type]
    outputs = llm.generate([[5], [5], [5]], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(InvalidRequest, match="2 sampling_params for 1 prompts"):
        llm.generate([5], params[:2], use_tqdm=False)


def test_without_parameters_the_models_own_defaults_count(llm: LLM) -> None:
    assert llm.default_sampling_params() == SamplingParams(temperature=0.6)
    (output,) = llm.generate([5, 6], use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16


def test_a_refused_prompt_is_named_and_the_rest_is_aborted(llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    with pytest.raises(InvalidRequest, match="exceeds the context length") as refusal:
        llm.generate([[5], [5] * 600, [6]], long, use_tqdm=False)
    assert refusal.value.__notes__ == ["request 2 of 3"]
    (output,) = llm.generate([5], GREEDY, use_tqdm=False)
    assert output.finished


def test_wrong_settings_are_named_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        LLM("model", max_modl_len=5)
    with pytest.raises(ConfigError, match="max_model_len='long' has the wrong type"):
        LLM("model", max_model_len="long")
    with pytest.raises(ConfigError, match="there is no setting 'tensor_parallel_size': this version serves one"):
        LLM("model", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"no setting 'colour'; they are the flags that `serve --help` lists"):
        LLM("model", colour="red")


def test_a_generating_model_gives_no_embeddings(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="generates text"):
        llm.embed("a", use_tqdm=False)


def test_prompts_may_be_dicts_with_one_of_three_keys(llm: LLM) -> None:
    texts, dicts = [PROMPTS[3], [5, 6]], [{"prompt": PROMPTS[3]}, {"prompt_token_ids": np.array([5, 6])}]
    plain, given = (llm.generate(prompts, GREEDY, use_tqdm=False) for prompts in (texts, dicts))
    assert [output.outputs[0].token_ids for output in given] == [output.outputs[0].token_ids for output in plain]
    (alone,) = llm.generate({"prompt_token_ids": [5, 6], "cache_salt": "mine"}, GREEDY, use_tqdm=False)
    assert alone.outputs[0].token_ids == plain[1].outputs[0].token_ids


def test_embedded_tokens_answer_like_the_tokens(llm: LLM, tiny_model: Path) -> None:
    table = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"].float()
    rows = {"prompt_embeds": table[[5, 6, 7]].numpy()}
    plain, embedded = llm.generate([[5, 6, 7], rows], GREEDY, use_tqdm=False)
    assert embedded.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_constraint_binds_as_over_http(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=8, structured_outputs={"regex": "[0-9]+"}),  # type: ignore[arg-type]
        SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=StructuredOutputs("choice", '["yes", "no"]')),
    ]
    digits, choice = (output.outputs[0].text for output in llm.generate([[5], [5]], params, use_tqdm=False))
    assert re.fullmatch("[0-9]+", digits), digits
    assert choice in ("yes", "no")


def test_an_output_that_cannot_fit_is_refused_in_the_servers_words(llm: LLM, tiny: Server) -> None:
    for num_tokens, over in ((10, 1), (600, 1), (1, 5000)):
        with pytest.raises(InvalidRequest) as refusal:
            llm.generate([5] * num_tokens, SamplingParams(max_tokens=512 - 10 + over), use_tqdm=False)
        refused = {"prompt": [5] * (num_tokens if num_tokens < 512 else 9000), "max_tokens": 8192 - 10 + over}
        answer = post(tiny, "/v1/completions", refused).json()["error"]
        assert re.sub(r"\d+", "N", answer["message"]) == re.sub(r"\d+", "N", str(refusal.value))
        assert f"max_tokens={512 - 10 + over}" in str(refusal.value)
    (cut,) = llm.generate([5] * 505, use_tqdm=False)
    assert len(cut.outputs[0].token_ids) <= 7


SCRIPT = """
import sys
from serve import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_cache_memory_bytes=32 << 20, max_model_len=4096)
endless = SamplingParams(max_tokens=4000, ignore_eos=True)
try:
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    while True:
        llm.generate([[5]] * 8, endless, use_tqdm=False)
except KeyboardInterrupt:
    (output,) = llm.generate([5], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    sys.stdout.write(f"interrupted, then {len(output.outputs[0].token_ids)} tokens\\n")
"""


def test_an_interrupt_ends_the_call_and_the_program_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with log.open("wb") as stderr:
        program = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tiny_model)], cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n", log.read_text()
    (engine_core,) = psutil.Process(program.pid).children()
    program.send_signal(signal.SIGINT)
    rest, _ = program.communicate(timeout=LIMIT_S)
    assert rest == "interrupted, then 2 tokens\n"
    assert program.returncode == 0, log.read_text()
    assert "Traceback" not in log.read_text()
    assert "did not stop" not in log.read_text()
    wait_until(lambda: not engine_core.is_running(), 10, "the engine core is gone")


def test_ids_of_any_integer_type_are_taken_and_others_refused(llm: LLM) -> None:
    plain, kinds = llm.generate([[1, 5], [True, np.int64(5)]], GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    assert kinds.prompt_token_ids == [1, 5]
    assert kinds.outputs[0].token_ids == plain.outputs[0].token_ids
    for wrong in (None, [1.5], [None], 5):
        with pytest.raises(
            InvalidRequest, match="a text or a list of token ids, which are whole numbers, or a dict with exactly one"
        ):
            llm.generate([[5], wrong], GREEDY, use_tqdm=False)  # type: ignore[arg-type]


def test_a_closed_llm_says_so(llm: LLM) -> None:
    """The last test of this module: it closes the LLM that the others share."""
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="was closed"):
        llm.generate([5], GREEDY, use_tqdm=False)
