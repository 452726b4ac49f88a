"""Embeddings of a real model, scores of a seeded cross-encoder and vectors of a decoder, by real clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tests.checkpoints import BOS, build_tokenizer
from tests.e2e.server import EMBEDDING_MODEL, Server
from tests.pooling_checkpoints import build_pooling_reference

TEXTS = (
    "hello",
    "The quick brown fox jumps over the lazy dog.",
    "I can't believe it's not butter!",
    "def add(a, b):\n    return a + b",
    "Caf\u00e9 na\u00efve \u00fcber stra\u00dfe, r\u00e9sum\u00e9",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\U0001f600 emoji \U0001f680 in text",
    "SHOUTING IN CAPITALS",
    "12345 6789 0.001 1e-5",
    "  spaces   and\ttabs \n and lines  ",
    "a",
    ".",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "https://example.org/path?query=1#part",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440",
    "[CLS] and [SEP] and [MASK] as text",
    "control \x07 and null \x00 characters",
    "word " * 40,
    "A longer paragraph of text. " * 20,
    "edge " * 254,
)


@cache
def reference(folder: str) -> tuple[BertTokenizer, PreTrainedModel]:
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def reference_vector(folder: str, text: str) -> np.ndarray:
    """Give the mean of the last layer's rows, brought to length 1, by transformers."""
    tokenizer, model = reference(folder)
    rows = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    vector = rows.mean(dim=0)
    return (vector / vector.norm()).numpy()


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def test_embeddings_equal_transformers_in_a_batch_and_alone(embeddings: Server, embedding_folder: Path) -> None:
    client = client_of(embeddings)
    expected = np.stack([reference_vector(str(embedding_folder), text) for text in TEXTS])
    # The client asks for base64 and decodes it by itself.
    batch = client.embeddings.create(model=EMBEDDING_MODEL, input=list(TEXTS))
    together = np.array([item.embedding for item in batch.data])
    np.testing.assert_allclose(together, expected, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    for index in (0, 9, 18):
        alone = client.embeddings.create(model=EMBEDDING_MODEL, input=TEXTS[index], encoding_format="float")
        np.testing.assert_allclose(alone.data[0].embedding, together[index], atol=1e-6)


def test_usage_counts_the_tokens_of_all_inputs(embeddings: Server, embedding_folder: Path) -> None:
    tokenizer, _ = reference(str(embedding_folder))
    reply = client_of(embeddings).embeddings.create(model=EMBEDDING_MODEL, input=["hello", "two words"])
    total = len(tokenizer("hello").input_ids) + len(tokenizer("two words").input_ids)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (total, total)


def test_token_ids_give_the_vector_of_their_text(embeddings: Server, embedding_folder: Path) -> None:
    tokenizer, _ = reference(str(embedding_folder))
    client = client_of(embeddings)
    ids = tokenizer("some token ids").input_ids
    reply = client.embeddings.create(model=EMBEDDING_MODEL, input=[ids, ids])
    for item in reply.data:
        np.testing.assert_allclose(item.embedding, reference_vector(str(embedding_folder), "some token ids"), atol=1e-4)


def test_too_long_text_is_400_and_may_be_cut_as_transformers_does(embeddings: Server, embedding_folder: Path) -> None:
    client, text = client_of(embeddings), "edge " * 255
    with pytest.raises(openai.BadRequestError, match=r"257 tokens exceeds the 256 tokens") as caught:
        client.embeddings.create(model=EMBEDDING_MODEL, input=text)
    assert caught.value.code == "context_length_exceeded"
    cut = client.embeddings.create(model=EMBEDDING_MODEL, input=text, extra_body={"truncate_prompt_tokens": 32})
    tokenizer, model = reference(str(embedding_folder))
    with torch.no_grad():
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=32)
        vector = model(**inputs).last_hidden_state[0].mean(dim=0)
    assert cut.usage.prompt_tokens == 32
    np.testing.assert_allclose(cut.data[0].embedding, (vector / vector.norm()).numpy(), atol=1e-4)


def test_many_clients_at_once_get_the_vectors_of_one(embeddings: Server) -> None:
    client = client_of(embeddings)

    def vector(text: str) -> np.ndarray:
        return np.array(client.embeddings.create(model=EMBEDDING_MODEL, input=text).data[0].embedding)

    alone = [vector(text) for text in TEXTS[:10]]
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(vector, TEXTS[:10]))
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_unlike_texts_are_further_apart_than_like_ones(embeddings: Server) -> None:
    documents = ["The economy grew by two percent.", "A kitten sleeps on the sofa.", "Dogs bark at night."]
    reply = embeddings.client.post("/rerank", json={"query": "a young cat", "documents": documents})
    assert reply.json()["results"][0]["index"] == 1
    scores = embeddings.client.post("/score", json={"text_1": "a young cat", "text_2": documents}).json()["data"]
    best = reply.json()["results"][0]["relevance_score"]
    assert scores[1]["score"] == pytest.approx(best, abs=1e-6)


def test_model_is_listed_with_its_length_and_does_not_chat(embeddings: Server) -> None:
    client = client_of(embeddings)
    (model,) = client.models.list().data
    assert model.id == EMBEDDING_MODEL
    assert model.max_model_len == 256  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="its task is embed"):
        client.chat.completions.create(model=EMBEDDING_MODEL, messages=[{"role": "user", "content": "hi"}])
    assert "no kv cache" in embeddings.log()
    embeddings.wait_idle()


def test_generating_model_has_no_embeddings(tiny: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="its task is generate"):
        client_of(tiny).embeddings.create(model="tiny", input="hello")


def test_client_that_leaves_frees_its_requests(embeddings: Server) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{embeddings.base_url}/v1/embeddings", json={"input": ["long text " * 100] * 800}, timeout=0.5)
    embeddings.wait_idle()
    assert client_of(embeddings).embeddings.create(model=EMBEDDING_MODEL, input="still here").data


@torch.no_grad()
def test_cross_encoder_scores_pairs_like_transformers(cross_encoder: Server, cross_encoder_folder: Path) -> None:
    query = "how many people live in berlin?"
    documents = ["berlin is a big city", "the cat eats", "a million people and a river"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(cross_encoder_folder)
    model = build_pooling_reference("BertForSequenceClassification", num_labels=1)
    inputs = [
        tokenizer(query, text, return_tensors="pt", padding=False, return_token_type_ids=True) for text in documents
    ]
    expected = [float(torch.sigmoid(model(**item).logits[0, 0])) for item in inputs]
    reply = cross_encoder.client.post("/v1/score", json={"text_1": query, "text_2": documents}).json()
    assert [item["score"] for item in reply["data"]] == pytest.approx(expected, abs=1e-5)
    assert reply["usage"]["prompt_tokens"] == sum(item.input_ids.shape[1] for item in inputs)
    ranked = cross_encoder.client.post("/v2/rerank", json={"query": query, "documents": documents}).json()["results"]
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [item["index"] for item in ranked] == order
    assert [item["document"]["text"] for item in ranked] == [documents[index] for index in order]


@torch.no_grad()
def test_long_pair_is_cut_at_its_longer_text(cross_encoder: Server, cross_encoder_folder: Path) -> None:
    query, document = "how many people live", "the old city of berlin and paris " * 20
    tokenizer = PreTrainedTokenizerFast.from_pretrained(cross_encoder_folder)
    model = build_pooling_reference("BertForSequenceClassification", num_labels=1)
    kinds = {"return_tensors": "pt", "return_token_type_ids": True}
    inputs = tokenizer(query, document, truncation="longest_first", max_length=30, **kinds)
    body = {"text_1": query, "text_2": document, "truncate_prompt_tokens": 30, "use_activation": False}
    reply = cross_encoder.client.post("/score", json=body).json()
    assert reply["usage"]["prompt_tokens"] == 30
    assert reply["data"][0]["score"] == pytest.approx(float(model(**inputs).logits[0, 0]), abs=1e-4)


@torch.no_grad()
def test_decoder_gives_the_vector_of_its_last_token_in_chunks(decoder_embeddings: Server) -> None:
    text = "The quick brown fox. " * 12
    ids = build_tokenizer().encode(f"{BOS}{text}").ids
    rows = build_pooling_reference("LlamaForCausalLM").model(torch.tensor([ids])).last_hidden_state[0]
    reply = client_of(decoder_embeddings).embeddings.create(model="decoder", input=f"{BOS}{text}")
    assert reply.usage.prompt_tokens == len(ids) > 32
    np.testing.assert_allclose(reply.data[0].embedding, (rows[-1] / rows[-1].norm()).numpy(), atol=1e-4)
