"""LLM in a program: the server's answers, in order, with clear errors, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from serve import LLM, SamplingParams
from serve.errors import ConfigError, InvalidRequest
from tests.e2e.client import chat, choice_of, complete
from tests.e2e.server import Server
from tests.source_tree import ROOT
from tests.waiting import wait_until

LIMIT_S = 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [f"prompt number {i} " + "x" * (7 * i % 40) for i in range(40)]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), kv_cache_memory_bytes=32 << 20, max_num_seqs=4, max_model_len=512) as made:
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
    assert refusal.value.__notes__ == ["request 1 of 3, counted from 0"]
    (output,) = llm.generate([5], GREEDY, use_tqdm=False)
    assert output.finished
    with pytest.raises(InvalidRequest, match="wrong type"):
        llm.generate([5], SamplingParams(temperature="hot"), use_tqdm=False)  # type: ignore[arg-type]


def test_wrong_settings_are_named_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        LLM("model", max_modl_len=5)
    with pytest.raises(ConfigError, match="max_model_len='long' has the wrong type"):
        LLM("model", max_model_len="long")


def test_a_generating_model_gives_no_embeddings(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="generates text"):
        llm.embed("a", use_tqdm=False)


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


def test_a_closed_llm_says_so(llm: LLM) -> None:
    """The last test of this module: it closes the LLM that the others share."""
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="was closed"):
        llm.generate([5], GREEDY, use_tqdm=False)
