"""The files of a batch: good and bad lines, and an output that a later run goes on with."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from serve.entrypoints.batch_file import (
    BatchError,
    BatchLine,
    BatchOutput,
    BatchResponse,
    InputLine,
    check_paths,
    count_lines,
    read_lines,
)
from serve.errors import ConfigError


def line(custom_id: object = "a", **changes: object) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}, **changes}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def read(path: Path, max_bytes: int = 1000) -> list[InputLine]:
    return list(read_lines(path, max_bytes=max_bytes))


def test_a_line_keeps_its_body_as_it_was_sent(tmp_path: Path) -> None:
    source = write(tmp_path / "in", '{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"p" : 1.0} }', "")
    (only,) = read(source)
    assert only.request is not None
    assert (only.custom_id, bytes(only.request.body)) == ("a", b'{"p" : 1.0}')
    assert count_lines(source) == 1


@pytest.mark.parametrize(
    ("bad", "custom_id", "text"),
    [
        ("not json", None, "JSON is malformed"),
        ("[1]", None, "Expected `object`"),
        (line(7), None, "custom_id"),
        (line(""), "", "1 to 512 characters"),
        (line("x" * 600), "x" * 600, "1 to 512 characters"),
        (line("b", method="GET"), "b", "method must be POST"),
        (line("b", url="/v1/models"), "b", "not possible in a batch"),
        (line("b", url="http://example.com/v1/completions"), "b", "not possible in a batch"),
        (line("b", body="text"), "b", "Expected `object`"),
        (line("b", body={"stream": True}), "b", "stream is not possible"),
        ({"custom_id": "b", "method": "POST", "url": "/v1/completions"}, "b", "missing required field `body`"),
        (line("b", body={"prompt": "x" * 1000}), None, "the limit is 1000"),
        (line("a"), None, "'a' was used before"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), None, "line 2"),
    ],
)
def test_a_bad_line_says_what_is_wrong_and_where(tmp_path: Path, bad: object, custom_id: str | None, text: str) -> None:
    good, wrong, last = read(write(tmp_path / "in", line("a"), bad, line("z")))
    assert good.request is not None
    assert last.request is not None
    assert (wrong.request, wrong.custom_id) == (None, custom_id)
    assert wrong.problem.startswith("line 2: ")
    assert text in wrong.problem


def answered(custom_id: str) -> BatchLine:
    return BatchLine("batch_req_1", custom_id, BatchResponse(200, "r", msgspec.Raw(b'{"ok":1}')))


def test_a_later_run_knows_what_is_done_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    target = tmp_path / "out"
    first = BatchOutput(target)
    first.add(answered("a"))
    first.add(BatchLine("batch_req_2", None, error=BatchError("invalid_line", "line 3: bad")))
    first.close()
    whole = target.read_bytes()
    target.write_bytes(whole + b'{"id":"batch_req_3","custom_id":"b","resp')
    again = BatchOutput(target)
    source = write(tmp_path / "in", line("a"), line("b"))
    done, left = read(source)
    assert again.has(done)
    assert not again.has(left)
    assert again.has(InputLine(None, None, "line 3: bad"))
    assert not again.has(InputLine(None, None, "line 4: bad"))
    again.add(answered("b"))
    again.close()
    assert target.read_bytes().startswith(whole)
    assert [json.loads(each)["custom_id"] for each in target.read_text().splitlines()] == ["a", None, "b"]


def test_lines_are_written_one_by_one(tmp_path: Path) -> None:
    output = BatchOutput(tmp_path / "out")
    output.add(answered("a"))
    (written,) = (tmp_path / "out").read_text().splitlines()
    assert json.loads(written) == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": {"ok": 1}},
        "error": None,
    }
    output.close()


def test_an_output_that_is_no_batch_is_left_alone(tmp_path: Path) -> None:
    target = write(tmp_path / "out", "dear diary")
    with pytest.raises(ConfigError, match="line 1 is no line of a batch"):
        BatchOutput(target)
    assert target.read_text() == "dear diary\n"


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ("https://example.com/in.jsonl", "out", "is a URL"),
        ("in", "s3://bucket/out", "is a URL"),
        ("missing", "out", "is not a file"),
        ("in", "nowhere/out", "does not exist"),
        ("in", "in", "cannot be written"),
        ("in", ".", "cannot be written"),
    ],
)
def test_only_local_files_are_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", line())
    with pytest.raises(ConfigError, match=text):
        check_paths(Path(source), Path(target))
