"""Prompts as embeddings, beam search and loops on a real engine, against the tokens and transformers."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save
from transformers import AutoModelForCausalLM

from tests.e2e.client import chat, choice_of, complete, usage_of
from tests.e2e.server import Server

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def embedding(tiny_model: Path) -> np.ndarray:
    return load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)


def ids(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(4, 330, count)]


def packed(rows: np.ndarray) -> str:
    return base64.b64encode(save({"prompt_embeds": rows})).decode()


def test_w4_megabytes_of_embeddings_answer_like_their_tokens(tiny: Server, embedding: np.ndarray) -> None:
    prompt = ids(8000)
    rows = embedding[prompt]
    assert rows.nbytes > 1_500_000
    fields = {"max_tokens": 16, "logprobs": 3}
    by_tokens = complete(tiny, prompt, **fields)
    by_rows = tiny.client.post(COMPLETIONS, json={"prompt_embeds": packed(rows), "temperature": 0, **fields}).json()
    assert by_rows["choices"] == by_tokens["choices"]
    assert by_rows["usage"]["prompt_tokens"] == 8000
    again = tiny.client.post(COMPLETIONS, json={"prompt_embeds": packed(rows), "temperature": 0, **fields}).json()
    assert again["choices"] == by_tokens["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 7900


def test_embeddings_come_before_the_other_prompts(tiny: Server, embedding: np.ndarray) -> None:
    first, second, third = ids(30, 1), ids(40, 2), ids(50, 3)
    raw = {"dtype": "float32", "shape": [40, embedding.shape[1]]}
    raw["data"] = base64.b64encode(embedding[second].tobytes()).decode()
    body = {"prompt_embeds": [packed(embedding[first]), raw], "prompt": third, "max_tokens": 8, "temperature": 0}
    reply = tiny.client.post(COMPLETIONS, json=body).json()
    expected = [choice_of(complete(tiny, prompt, max_tokens=8))["text"] for prompt in (first, second, third)]
    assert [choice["text"] for choice in reply["choices"]] == expected


def test_embeddings_of_another_model_are_refused(tiny: Server, embedding: np.ndarray) -> None:
    wide = np.zeros((4, embedding.shape[1] + 1), dtype=np.float32)
    reply = tiny.client.post(COMPLETIONS, json={"prompt_embeds": packed(wide), "max_tokens": 1})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt_embeds"
    too_long = np.zeros((9000, embedding.shape[1]), dtype=np.float32)
    reply = tiny.client.post(COMPLETIONS, json={"prompt_embeds": packed(too_long), "max_tokens": 1})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_beams_are_those_of_transformers(tiny: Server, tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompt = ids(20, 5)
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 20, dtype=torch.long),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=7,
        do_sample=False,
        temperature=None,
        pad_token_id=0,
    )
    fields = {"use_beam_search": True, "n": 4, "max_tokens": 7, "ignore_eos": True, "return_token_ids": True}
    reply = complete(tiny, prompt, **fields)
    found = [choice["token_ids"] for choice in reply["choices"]]  # type: ignore[attr-defined]
    assert found == expected[:, 20:].tolist()
    assert usage_of(reply)["completion_tokens"] == 28
    tiny.wait_idle()


def test_a_chat_has_beams_too(tiny: Server) -> None:
    reply = chat(tiny, "hello", use_beam_search=True, n=3, max_tokens=4, ignore_eos=True)
    texts = [choice["message"]["content"] for choice in reply["choices"]]  # type: ignore[attr-defined]
    assert len(set(texts)) == 3


def test_a_loop_ends_the_answer_with_its_own_reason(tiny: Server) -> None:
    """A bias makes one token certain; the fourth in a row ends the answer."""
    loop = {"max_pattern_size": 3, "min_count": 4}
    fields = {"logit_bias": {"70": 100}, "max_tokens": 50, "ignore_eos": True, "return_token_ids": True}
    choice = choice_of(complete(tiny, [5, 6], repetition_detection=loop, **fields))
    assert choice["token_ids"] == [70] * 4
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    choice = choice_of(chat(tiny, "hello", repetition_detection=loop, logit_bias={"70": 100}, max_tokens=50))
    assert choice["finish_reason"] == "repetition"
    ended = {labels["finished_reason"]: value for labels, value in tiny.samples("serve:request_success_total")}
    assert ended["repetition"] >= 2


def test_exactly_the_chosen_ids_have_logprobs(tiny: Server) -> None:
    every = choice_of(complete(tiny, [5, 6, 7], max_tokens=1, logprobs=20))["logprobs"]["top_logprobs"][0]  # type: ignore[index]
    fields = {"max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True}
    choice = choice_of(complete(tiny, [5, 6, 7], logprob_token_ids=[100, 200, 300], **fields))
    (shown,) = choice["logprobs"]["top_logprobs"]  # type: ignore[index]
    sampled = choice["logprobs"]["tokens"][0]  # type: ignore[index]
    assert set(shown) == {sampled, "token_id:100", "token_id:200", "token_id:300"}
    assert max(every.values()) == shown[sampled]
