"""What a JSONL file may contain, and what is refused with line and field."""

import gzip
import re

import pytest

from leeway.tasks import TaskError, load_task, task_config


def load(path):
    return load_task(task_config(kind="jsonl", path=str(path)))


def line(answer, prompt='"p"', more=""):
    return f'{{"prompt": {prompt}, "answer": {answer}{more}}}\n'


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("0.00001", "0.00001"),
        ("1e-05", "1e-05"),
        ("5.0", "5.0"),
        ("0.10", "0.10"),
        ("-0", "-0"),
        ("1E5", "1E5"),
        ("1e999", "1e999"),
        ("0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"),
        ("9007199254740993", "9007199254740993"),  # 2**53 + 1
        ("1" * 5000, "1" * 5000),
        ('"\u2212.5"', "\u2212.5"),
        ('"a\\u0000b"', "a\0b"),
        ('"\\ud83d\\ude00"', "\U0001f600"),
        ('""', ""),
    ],
    ids=lambda value: ascii(value[:30]),
)
def test_answers_are_kept_as_they_are_written(tmp_path, answer, text):
    (tmp_path / "items.jsonl").write_text(line(answer))
    assert load(tmp_path / "items.jsonl").item(0).answer == text


def test_metadata_has_plain_numbers(tmp_path):
    (tmp_path / "items.jsonl").write_text(
        line('"a"', more=', "m": {"list": [1, 2.5, null, true], "big": 9007199254740993}, "n": 1e3')
    )
    item = load(tmp_path / "items.jsonl").item(0)
    assert item.metadata == {"m": {"list": [1, 2.5, None, True], "big": 2**53 + 1}, "n": 1000.0}
    assert [type(value) for value in item.metadata["m"]["list"]] == [int, float, type(None), bool]
    assert item.source.endswith("items.jsonl, line 1")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            line("NaN"),
            "field 'answer' is NaN, which is not a value of JSON; correct the value, or write it as text",
        ),
        (line("-Infinity"), "field 'answer' is -Infinity"),
        (line('"a"', "Infinity"), "field 'prompt' is Infinity"),
        (line('"a"', more=', "m": {"x": [NaN]}'), "field 'm' is NaN"),
        ("NaN\n", "expected a JSON object, got NaN"),
        (line("null"), "field 'answer' must be text or a number, got null"),
        (line("true"), "field 'answer' must be text or a number, got true"),
        (line("[1]"), "field 'answer' must be text or a number, got a list"),
        (line("{}"), "field 'answer' must be text or a number, got an object"),
        (line('"a"', "null"), "field 'prompt' must be text or a list of .*, got null"),
        (line('"a"', "7"), "field 'prompt' must be text or a list of .*, got a number"),
        (line('"a"', more=', "answer": "b"'), "field 'answer' is duplicated"),
        (line('"a"', more=', "m": {"x": 1, "x": 2}'), "field 'x' is duplicated"),
        (line('"a"', more=', "m": ' + "1" * 4301), "field 'm': an integer of 4301 digits"),
        (line('"a"', more=', "m": -1e999'), "field 'm': -1e999 is beyond the range"),
        (line('"\\ud800"'), "field 'answer' contains a lone surrogate"),
        (line('"a"', more=', "m": ["\\udfff"]'), "field 'm' contains a lone surrogate"),
        (line('"a"', more=', "\\ud800": 1'), "contains a lone surrogate"),
        (line('"a"', "[" * 100_000), "not usable JSON"),
        (line("01"), "not JSON"),
        (line(".5"), "not JSON"),
        (line("+5"), "not JSON"),
        ("{'prompt': 'p', 'answer': 'a'}\n", "not JSON"),
        ('{\n"prompt": "p",\n', "not JSON .*; expected one JSON object per line"),
        ('"text"\n', "expected a JSON object, got text"),
        (line('"a"').strip() + line('"b"'), "not JSON .Extra data at column"),
    ],
    ids=lambda value: ascii(value[:40]),
)
def test_what_json_does_not_define_is_refused_with_line_and_field(tmp_path, bad, message):
    (tmp_path / "items.jsonl").write_text(line('"first"') + bad)
    with pytest.raises(TaskError, match=f"items.jsonl, line 2: .*{message}|items.jsonl, line 2: {message}"):
        load(tmp_path / "items.jsonl")


@pytest.mark.parametrize(
    ("content", "items"),
    [
        (b"\xef\xbb\xbf" + line('"a"').encode(), 1),
        (line('"a"').encode() + b"\xef\xbb\xbf" + line('"b"').encode(), 2),  # files that were joined
        (line('"a"').replace("\n", "\r\n").encode() * 2, 2),
        (line('"a"').rstrip().encode(), 1),
        (b"\n \r\n" + line('"a"').encode() + b"\n\n", 1),
        (line('"a\u2028b"').encode(), 1),
    ],
    ids=["bom", "bom-inside", "crlf", "no-newline", "blank-lines", "line-separator"],
)
def test_line_ends_and_byte_order_marks_are_read(tmp_path, content, items):
    (tmp_path / "items.jsonl").write_bytes(content)
    assert len(load(tmp_path / "items.jsonl")) == items


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(line('"a"').encode()), "is compressed with gzip"),
        (b"\x28\xb5\x2f\xfd rest", "is compressed with zstd"),
        (b"PAR1 rest", "is a Parquet file"),
        (line('"a"').encode("utf-16"), "is UTF-16 text"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        (b'[{"prompt": "p", "answer": "a"}]\n', r"starts with \[: it is a JSON array"),
        (b'\n  [\n{"prompt": "p", "answer": "a"}]\n', "line 2: not JSON"),
        (line('"caf\u00e9"').encode("latin-1"), "line 1: not UTF-8"),
        (b"", "has no items"),
        (b"\xef\xbb\xbf", "has no items"),
        (b'"' + b"x" * (16 << 20) + b'"\n', "line 1: longer than 16 MiB"),
    ],
    ids=[
        "gzip",
        "zstd",
        "parquet",
        "utf-16",
        "lfs",
        "array",
        "late-array",
        "latin-1",
        "empty",
        "bom",
        "long",
    ],
)
def test_another_format_is_named(tmp_path, content, message):
    (tmp_path / "items.jsonl").write_bytes(content)
    with pytest.raises(TaskError, match=message):
        load(tmp_path / "items.jsonl")


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(TaskError, match=re.escape(f"task.path: {tmp_path} is a directory")):
        load(tmp_path)


def test_a_number_that_no_reward_can_read_is_refused_with_its_line(tmp_path):
    from leeway.rewards import load_reward

    (tmp_path / "items.jsonl").write_text("\n" + line("5") + "\n" + line("1e99999"))
    config = task_config(kind="jsonl", path=str(tmp_path / "items.jsonl"), reward="last_number")
    with pytest.raises(
        TaskError, match=r"item 1 .*'1e99999', which is not a number \(.*items.jsonl, line 4\)"
    ):
        load_reward(config, load_task(config))
