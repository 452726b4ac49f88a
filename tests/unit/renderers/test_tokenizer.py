"""Tokenizers of checkpoint folders: same ids and text as transformers, bounded work, errors that help."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from serve.checkpoint import Checkpoint, ModelArch
from serve.errors import ConfigError, ExitCode
from serve.renderers.tokenizer import FastTokenizer, load_tokenizer
from serve.renderers.tokenizer_files import load_folder
from tests.unit.renderers.samples import varied_texts

ARCH = ModelArch("LlamaForCausalLM", 700, 8, 8, 1, 1, 1, 8, 1e-5, 64, 1e4)


def checkpoint(root: Path, eos_token_ids: tuple[int, ...] = ()) -> Checkpoint:
    return Checkpoint("m", str(root), "safetensors", (), ARCH, eos_token_ids)


def write_config(folder: Path, **changes: object) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.fixture
def folder(bpe_folder: Path, tmp_path: Path) -> Path:
    """A copy of the byte-level tokenizer's folder that a test may change."""
    return Path(shutil.copytree(bpe_folder, tmp_path / "copy"))


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_and_text_equal_transformers(bpe_folder: Path, bpe: FastTokenizer, add_special_tokens: bool) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(bpe_folder)
    texts = [*varied_texts(), "<|im_start|>user\nhi<|im_end|>\n", "<tool_call>{}</tool_call>"]
    for text in texts:
        ids = bpe.encode(text, add_special_tokens=add_special_tokens)
        expected = reference(text, add_special_tokens=add_special_tokens)["input_ids"]
        if text.startswith("<|im_start|>") and add_special_tokens:
            expected = expected[1:]
        assert ids == expected, text
        for skip in (True, False):
            assert bpe.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip), text


def test_properties_describe_the_vocabulary(bpe_folder: Path, bpe: FastTokenizer) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(bpe_folder)
    vocab = json.loads((bpe_folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert bpe.vocab_size == len(reference) == 701
    assert bpe.max_token_id == 700
    assert (bpe.bos_token_id, bpe.eos_token_id) == (reference.bos_token_id, reference.eos_token_id) == (1, 2)
    assert bpe.all_special_ids == {0, 1, 2}
    assert bpe.max_chars_per_token == max(len(t) for t in [*vocab, "<tool_call>"])
    assert bpe.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert bpe.chat_template == "{{ messages[0].content }}"
    assert bpe.token_to_id("<tool_call>") == 700
    assert bpe.id_to_token(700) == "<tool_call>"
    assert [bpe.id_to_token(i) for i in (-1, 701, 2**40)] == ["", "", ""]


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_tokenizer_json_decides_about_bos_as_in_transformers(folder: Path, add_bos: bool | None) -> None:
    write_config(folder, add_bos_token=add_bos)
    tokenizer = FastTokenizer(load_folder(folder))
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer.encode("a b", add_special_tokens=True)
    assert ids[0] == 1
    assert ids == reference("a b")["input_ids"]


def test_text_that_begins_with_bos_gets_no_second_one(bpe: FastTokenizer) -> None:
    with_bos = bpe.encode("<|im_start|>hello", add_special_tokens=True)
    assert with_bos == [1, *bpe.encode("hello", add_special_tokens=False)]


def test_bos_sent_twice_on_purpose_stays_twice(bpe: FastTokenizer) -> None:
    assert bpe.encode("<|im_start|><|im_start|>", add_special_tokens=False) == [1, 1]


def test_tokens_listed_only_in_the_configuration_are_added(folder: Path) -> None:
    entry = {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    write_config(folder, added_tokens_decoder={"701": entry})
    tokenizer = FastTokenizer(load_folder(folder))
    assert tokenizer.encode("a<extra>", add_special_tokens=False)[-1] == 701
    assert 701 in tokenizer.all_special_ids


def test_added_token_may_be_listed_as_plain_text(folder: Path) -> None:
    write_config(folder, added_tokens_decoder={"701": "<extra>", "x": {"content": 5}})
    assert FastTokenizer(load_folder(folder)).token_to_id("<extra>") == 701


def test_templates_see_the_special_tokens_that_a_model_adds(folder: Path) -> None:
    write_config(folder, extra_special_tokens={"image_token": "<|endoftext|>", "odd": {"content": 3}})
    assert load_folder(folder).special_tokens["image_token"] == "<|endoftext|>"


def test_named_special_token_is_skipped_even_if_tokenizer_json_calls_it_ordinary(folder: Path) -> None:
    write_config(folder, eos_token="<tool_call>")
    tokenizer = FastTokenizer(load_folder(folder))
    assert tokenizer.eos_token_id == 700
    assert tokenizer.decode([700], skip_special_tokens=True) == ""


def test_stored_truncation_and_padding_are_switched_off(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    ids = FastTokenizer(load_folder(folder)).encode("one two three four", add_special_tokens=False)
    assert 3 < len(ids) < 50


@pytest.mark.parametrize("max_length", [0, 1, 7, 100])
def test_limited_encode_gives_the_first_ids_of_the_full_one(bpe: FastTokenizer, max_length: int) -> None:
    text = " ".join(varied_texts(400, seed=3))
    full = bpe.encode(text, add_special_tokens=True)
    assert bpe.encode(text, add_special_tokens=True, max_length=max_length) == full[:max_length]


def test_limited_encode_of_dense_text_is_exact_when_the_first_probe_says_too_little(bpe: FastTokenizer) -> None:
    text = "=" * 4096 + " end"
    full = bpe.encode(text, add_special_tokens=False)
    assert len(full) < 4096 // 8 + 64
    assert bpe.encode(text, add_special_tokens=False, max_length=len(full)) == full


def test_lone_surrogates_count_as_the_replacement_character(bpe: FastTokenizer) -> None:
    ids = bpe.encode("a\ud83d b", add_special_tokens=False)
    assert ids == bpe.encode("a\ufffd b", add_special_tokens=False)


def test_surrogate_pair_is_one_character(bpe: FastTokenizer) -> None:
    ids = bpe.encode("\ud83d\ude42", add_special_tokens=False)
    assert bpe.decode(ids, skip_special_tokens=False) == "\U0001f642"


def test_ids_without_a_token_decode_to_nothing(bpe: FastTokenizer) -> None:
    ids = bpe.encode("hi", add_special_tokens=False)
    assert bpe.decode([-1, *ids, 100_000], skip_special_tokens=False) == "hi"


def test_token_bytes_join_to_the_text(bpe: FastTokenizer) -> None:
    for text in varied_texts(50):
        ids = bpe.encode(text, add_special_tokens=False)
        assert b"".join(bpe.token_to_bytes(i) for i in ids) == text.encode()


def test_eos_comes_from_the_checkpoint_when_the_tokenizer_names_none(folder: Path) -> None:
    write_config(folder, eos_token=None)
    assert load_tokenizer(checkpoint(folder, (5, 6)), None).eos_token_id == 5


def test_override_replaces_the_checkpoints_tokenizer(bpe_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(checkpoint(tmp_path), str(bpe_folder))
    assert tokenizer.vocab_size == 701


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "A"}, "A"),
        ({"chat_template.json": '{"chat_template": "B"}'}, "{{ messages[0].content }}"),
        ({"additional_chat_templates/tool_use.jinja": "T"}, {"default": "{{ messages[0].content }}", "tool_use": "T"}),
    ],
)
def test_chat_template_files(folder: Path, files: dict[str, str], expected: object) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert load_folder(folder).chat_template == expected


def test_named_templates_in_the_configuration(folder: Path) -> None:
    write_config(folder, chat_template=[{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}])
    assert load_folder(folder).chat_template == {"default": "D", "rag": "R"}


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", "{}", "tokenizer.json cannot be used"),
        ("tokenizer.json", "not json", "tokenizer.json cannot be used"),
        ("tokenizer_config.json", "[", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "is not JSON"),
        ("chat_template.jinja", b"\xff\xfe", "cannot be read"),
    ],
)
def test_broken_file_is_a_model_error_that_names_it(folder: Path, name: str, content: str | bytes, match: str) -> None:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=match) as caught:
        load_folder(folder)
    assert caught.value.exit_code == ExitCode.MODEL


def test_folder_without_tokenizer_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither tokenizer\.json nor .*--tokenizer") as caught:
        load_tokenizer(checkpoint(tmp_path), None)
    assert caught.value.exit_code == ExitCode.MODEL


def test_override_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        load_tokenizer(checkpoint(tmp_path), str(tmp_path / "missing"))


def test_normal_load_imports_neither_torch_nor_transformers(bpe_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from serve.renderers import renderer, tokenizer_files; "
        f"tokenizer_files.load_folder(Path({str(bpe_folder)!r})); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
