"""The servers that tests share: each set of flags is started once, when a test first asks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import BUILT_IN, EMBEDDING_MODEL, Server, running
from tests.source_tree import ROOT

PULL_LIMIT_S = 600


@pytest.fixture(scope="session")
def built_in_model() -> str:
    """Fetch the built-in model into the user's cache once; later runs find it there."""
    done = subprocess.run(
        [sys.executable, "-m", "serve", "pull", BUILT_IN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PULL_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return BUILT_IN


@pytest.fixture(scope="session")
def main_server(built_in_model: str) -> Iterator[Server]:
    """The default launch: `serve` with the built-in model and no flag but the port."""
    with running(model=built_in_model) as server:
        yield server


@pytest.fixture
def server(main_server: Server) -> Server:
    """The default launch, short name; idle before each test."""
    main_server.wait_idle()
    return main_server


@pytest.fixture(scope="session")
def tight_server(built_in_model: str) -> Iterator[Server]:
    """Small everything: context 512, 40 usable blocks, 64-token steps (16 of one prompt), 4 requests, admin routes."""
    flags = (
        *("--max-model-len", "512", "--num-gpu-blocks-override", "41", "--max-num-batched-tokens", "64"),
        *("--max-num-seqs", "4", "--long-prefill-token-threshold", "16", "--dev-mode"),
    )
    with running(*flags, model=built_in_model) as server:
        yield server


@pytest.fixture
def tight(tight_server: Server) -> Server:
    """The small server with an empty prefix cache."""
    tight_server.wait_idle()
    answer = tight_server.client.post("/reset_prefix_cache")
    assert answer.json() == {"success": True}
    return tight_server


@pytest.fixture(scope="session")
def plain_server(built_in_model: str) -> Iterator[Server]:
    """The other side of each comparison: no async scheduling, no prefix cache, processed logprobs, 10-token chunks."""
    flags = (
        *("--no-async-scheduling", "--no-enable-prefix-caching", "--logprobs-mode", "processed_logprobs"),
        *("--stream-interval", "10", "--kv-cache-memory", "256MiB", "--max-model-len", "2048"),
    )
    with running(*flags, model=built_in_model) as server:
        yield server


@pytest.fixture
def plain(plain_server: Server) -> Server:
    """The comparison server, idle."""
    plain_server.wait_idle()
    return plain_server


@pytest.fixture(scope="session")
def one_at_a_time_server(built_in_model: str) -> Iterator[Server]:
    """Priority policy, one running request, so that the waiting queue shows; the length is what 64 blocks hold."""
    flags = (
        *("--scheduling-policy", "priority", "--max-num-seqs", "1"),
        *("--max-model-len", "-1", "--num-gpu-blocks-override", "65"),
    )
    with running(*flags, model=built_in_model) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Llama with 331 ids that adds BOS to raw text; its own defaults are temperature 0.6, two ends."""
    # Heavy, and only the tests that need this checkpoint should pay for it.
    from tests.checkpoints import write_checkpoint

    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)
    generation = {"bos_token_id": 0, "eos_token_id": [2, 3], "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    bos = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos["id"]: bos},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[Server]:
    """The seeded random model: thousands of tokens a second. It takes prompts as embeddings too."""
    flags = ("--served-model-name", "tiny", "--kv-cache-memory", "64MiB", "--enable-prompt-embeds")
    with running(*flags, model=str(tiny_model)) as server:
        yield server


@pytest.fixture
def tiny(tiny_server: Server) -> Server:
    """The fast server, idle."""
    tiny_server.wait_idle()
    return tiny_server


@pytest.fixture(scope="session")
def parts_server(built_in_model: str) -> Iterator[Server]:
    """Answers with parts: calls as Hermes writes them, thoughts as Qwen3 marks them."""
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--kv-cache-memory", "256MiB")
    with running(*flags, "--max-model-len", "4096", model=built_in_model) as server:
        yield server


@pytest.fixture
def parts(parts_server: Server) -> Server:
    """The server that reads calls and thoughts, idle."""
    parts_server.wait_idle()
    return parts_server


@pytest.fixture(scope="session")
def embedding_folder() -> Path:
    """The folder of the real embedding model, fetched into the user's cache once."""
    done = subprocess.run(
        [sys.executable, "-m", "serve", "pull", EMBEDDING_MODEL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PULL_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def embeddings(embedding_folder: Path) -> Iterator[Server]:
    """The real embedding model under its own name."""
    with running(model=EMBEDDING_MODEL) as server:
        yield server


@pytest.fixture(scope="session")
def cross_encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded BERT with one label, which scores pairs of texts."""
    from tests.pooling_checkpoints import write_pooling_checkpoint

    folder = tmp_path_factory.mktemp("cross-encoder")
    return write_pooling_checkpoint(folder, "BertForSequenceClassification", num_labels=1)


@pytest.fixture(scope="session")
def cross_encoder(cross_encoder_folder: Path) -> Iterator[Server]:
    """The seeded scorer of pairs."""
    with running("--served-model-name", "pairs", model=str(cross_encoder_folder)) as server:
        yield server


@pytest.fixture(scope="session")
def decoder_embeddings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A seeded Llama that was made to generate and serves as an embedding model, 32 tokens a step."""
    from tests.pooling_checkpoints import write_pooling_checkpoint

    folder = write_pooling_checkpoint(tmp_path_factory.mktemp("decoder"), "LlamaForCausalLM")
    flags = ("--runner", "pooling", "--max-num-batched-tokens", "32", "--max-num-seqs", "8")
    with running("--served-model-name", "decoder", *flags, "--kv-cache-memory", "64MiB", model=str(folder)) as server:
        yield server
