"""Read and check instruction data from a file of JSON objects.

There are four kinds of rows, distinguished by their keys:

    {"messages": [{"role": ..., "content": ...}, ...]}
    {"conversations": [{"from": "human" | "gpt" | "system", "value": ...}, ...]}   ShareGPT's
    {"prompt": ..., "completion": ...}
    {"instruction": ..., "input": ..., "output": ...}
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from script_start import Refusal

ACCEPTED = (
    "expected text under 'messages', under 'conversations', under 'prompt' and 'completion', or "
    "under 'instruction' and 'output'"
)
MESSAGE = '{"role": "user", "content": "..."}'
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
"""ShareGPT's `from` -> role."""


def read_rows(path: Path | str) -> list[tuple[str, dict]]:
    """Read a file with one JSON object per line, or one list of objects, also compressed by gzip.

    It accepts empty lines, a byte order mark and both kinds of line ends, and returns conversations
    as messages.

    Returns:
        (place of the row: "line 3" or "row 3", the row); every row is one of the known kinds.
    Raises:
        Refusal: the file cannot be read or has no rows, or a row is malformed.
    """
    text = _read_text(Path(path))
    rows = []
    for place, row in _parsed(path, text):
        try:
            rows.append((place, as_messages(row)))
        except Refusal as refusal:
            raise Refusal(f"{path}, {place}: {refusal}") from None
    if not rows:
        raise Refusal(f"{path} has no rows; expected one JSON object per line, {ACCEPTED[9:]}")
    return rows


def as_messages(row: object) -> dict:
    """Return the row, ShareGPT's conversations as messages.

    Raises:
        Refusal: it is none of the known kinds, or one that is malformed.
    """
    if not isinstance(row, dict):
        raise Refusal(f"a JSON {_kind(row)}, not an object; {ACCEPTED}")
    if row.get("messages") is not None:
        return {**row, "messages": _checked_messages(row["messages"])}
    if row.get("conversations") is not None:
        return {"messages": _checked_messages(_from_sharegpt(row["conversations"]))}
    for question, answer in (("prompt", "completion"), ("instruction", "output")):
        if row.get(question) is None and row.get(answer) is None:
            continue
        for key in (question, answer):
            if not isinstance(row.get(key), str):
                raise Refusal(f"{key!r} is {_described(row, key)}; it is to be text")
        return row
    raise Refusal(f"A row with the keys {sorted(row)}: {ACCEPTED}")


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except IsADirectoryError:
        raise Refusal(f"{path} is a folder; expected a file of one JSON object per line") from None
    except (OSError, EOFError, zlib.error) as error:
        raise Refusal(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Refusal(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8; convert the file, "
            "for instance with iconv -f latin1 -t utf-8"
        ) from None


def _parsed(path: Path | str, text: str) -> Iterator[tuple[str, object]]:
    """Yield (place, value)."""
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise Refusal(f"{path}, {place}: not JSON ({error.msg})") from None
        except RecursionError:
            raise Refusal(f"{path}: not JSON (nested too deep)") from None
        yield from ((f"row {i}", value) for i, value in enumerate(values, start=1))
        return
    for i, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"line {i}", json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            is_deep = isinstance(error, RecursionError)
            what = "nested too deep" if is_deep else f"{error.msg}, column {error.colno}"
            raise Refusal(
                f"{path}, line {i}: not JSON ({what}); expected one JSON object per line, "
                f"{ACCEPTED[9:]}"
            ) from None


def _from_sharegpt(turns: object) -> list:
    if not isinstance(turns, list):
        raise Refusal(f"'conversations' is a JSON {_kind(turns)}, not a list")
    messages = []
    for i, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or "from" not in turn:
            messages.append(turn)  # some files have role and content here
        elif turn["from"] not in SPEAKERS:
            raise Refusal(
                f"turn {i} of 'conversations' is from {turn['from']!r}; "
                f"accepted are {', '.join(SPEAKERS)}"
            )
        else:
            messages.append({"role": SPEAKERS[turn["from"]], "content": turn.get("value")})
    return messages


def _checked_messages(messages: object) -> list[dict]:
    if not isinstance(messages, list):
        raise Refusal(f"'messages' is a JSON {_kind(messages)}, not a list of {MESSAGE}")
    if not messages:
        raise Refusal(f"a conversation without a message; expected a list of {MESSAGE}")
    for i, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise Refusal(f"message {i} is a JSON {_kind(message)}; expected {MESSAGE}")
        if not isinstance(message.get("role"), str):
            raise Refusal(f"message {i}: 'role' is {_described(message, 'role')}: {MESSAGE}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise Refusal(f"message {i} ({message['role']}) has no content; expected {MESSAGE}")
        if not isinstance(message.get("content"), str | list | None):
            kind = _kind(message["content"])
            raise Refusal(f"message {i} ({message['role']}): 'content' is a JSON {kind}, not text")
    return messages


def _described(row: dict, key: str) -> str:
    return "missing" if row.get(key) is None else f"a JSON {_kind(row[key])}"


def _kind(value: object) -> str:
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")
