"""Files as users have them: every mistake is one sentence that names file, row and way out."""

import gzip
import json

import pytest
from instruction_rows import SPEAKERS, as_messages, read_rows
from script_start import Refusal

ROW = {"prompt": "a list: ", "completion": "a sequence"}
LINE = json.dumps(ROW).encode()
TURN = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": "y"}


@pytest.mark.parametrize(
    "data",
    [
        LINE + b"\n" + LINE,
        b"\xef\xbb\xbf" + LINE + b"\n" + LINE + b"\n",
        LINE + b"\r\n" + LINE + b"\r\n",
        b"\n" + LINE + b"\n\n  \n" + LINE + b"\n\n",
        b"[" + LINE + b",\n" + LINE + b"]",
        gzip.compress(LINE + b"\n" + LINE, mtime=0),
    ],
    ids=["plain", "byte order mark", "CRLF", "blank lines", "list", "gzip"],
)
def test_every_way_to_write_two_rows(tmp_path, data):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    assert [row for _, row in read_rows(path)] == [ROW, ROW]


def test_a_line_separator_within_text_is_no_end_of_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**ROW, "prompt": "a\u2028b\x85"}, ensure_ascii=False))
    ((_, row),) = read_rows(path)
    assert row["prompt"] == "a\u2028b\x85"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "has no rows; expected one JSON object per line, text under 'messages'"),
        (b"\n \n", "has no rows"),
        (b"[]", "has no rows"),
        (LINE + b"\n\n" + LINE[:-3], "line 3: not JSON .*column.*'conversations'"),
        (b"[" + LINE + b",", "line 1, column .*: not JSON"),
        (LINE + b"\n" + b"[1]", "line 2: a JSON list, not an object"),
        (LINE + b"\nnull", "line 2: a JSON null, not an object"),
        (LINE + b"\n" + "\u00e9".encode("latin1"), "line 2: byte 0xe9 is not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (LINE[:-1], "line 1: not JSON"),
        (gzip.compress(LINE, mtime=0)[:-9], "rows.jsonl: "),
        (b'{"a": ' * 100_000, "line 1: not JSON"),
    ],
)
def test_a_malformed_file_names_the_line(tmp_path, data, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    with pytest.raises(Refusal, match=said) as refused:
        read_rows(path)
    assert "\n" not in str(refused.value)


def test_a_folder_and_a_missing_file(tmp_path):
    with pytest.raises(Refusal, match="is a folder; expected a file"):
        read_rows(tmp_path)
    with pytest.raises(Refusal, match=r"missing.jsonl: No such file"):
        read_rows(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": []}, "a conversation without a message"),
        ({"messages": "hello"}, "'messages' is a JSON string, not a list"),
        ({"messages": [TURN, "hello"]}, "message 2 is a JSON string"),
        ({"messages": [{"content": "x"}, ANSWER]}, "message 1: 'role' is missing"),
        ({"messages": [{"role": "user"}, ANSWER]}, r"message 1 \(user\) has no content"),
        ({"messages": [TURN, {"role": "assistant", "content": 4}]}, "'content' is a JSON number"),
        ({"conversations": []}, "a conversation without a message"),
        ({"conversations": {"from": "human"}}, "'conversations' is a JSON object"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "from 'bot'; accepted are human"),
        ({"conversations": [{"from": "human"}]}, r"message 1 \(user\) has no content"),
        ({"prompt": "x"}, "'completion' is missing; it is to be text"),
        ({"prompt": ["x"], "completion": "y"}, "'prompt' is a JSON list"),
        ({"instruction": "x", "output": None}, "'output' is missing"),
        ({"text": "x", "question": "y"}, r"\['question', 'text'\].*'messages'.*'completion'"),
    ],
)
def test_a_malformed_row_names_what_is_wrong(tmp_path, row, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINE + b"\n" + json.dumps(row).encode())
    with pytest.raises(Refusal, match=f"rows.jsonl, line 2: .*{said}") as refused:
        read_rows(path)
    assert "\n" not in str(refused.value)


def test_conversations_become_messages():
    turns = [{"from": speaker, "value": "x"} for speaker in SPEAKERS]
    roles = [message["role"] for message in as_messages({"conversations": turns})["messages"]]
    assert roles == list(SPEAKERS.values())
    assert as_messages({"conversations": [TURN, ANSWER]}) == {"messages": [TURN, ANSWER]}


def test_keys_that_are_null_count_as_missing():
    """Tables that were joined have every key in every row."""
    row = {"messages": None, "conversations": None, "prompt": "x", "completion": "y"}
    assert as_messages(row) is row


def test_a_call_of_a_tool_needs_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    assert as_messages({"messages": [TURN, call]})["messages"] == [TURN, call]
