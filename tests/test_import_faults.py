"""Files that are not what they should be: refused with file, place and reason, never a crash."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import ImportFailed
from tests.exports import CONVERSATIONS, conversation, run, written

USER = {"role": "user", "content": "hello"}
NODE = {"author": {"role": "user"}, "content": {"parts": ["hello"]}}


def faulty(**change: Any) -> str:
    """An export whose second conversation has another value in its one message."""
    good, bad = conversation({"g": None}, "g"), conversation({"u": None}, "u")
    bad["mapping"]["u"]["message"] = {**NODE, **change}
    return json.dumps([good, {**bad, "conversation_id": "bad"}])


def second(**change: Any) -> str:
    return json.dumps({**USER, "thread_id": "c"}) + "\n" + json.dumps({**USER, **change})


def called(**function: Any) -> str:
    call = {"id": "1", "type": "function", "function": {"name": "f", **function}}
    return json.dumps({"role": "assistant", "content": "", "tool_calls": [call]})


@pytest.mark.parametrize(
    ("name", "text", "where", "why"),
    [
        ("a.txt", "hello", "", "begins with 'h'"),
        ("empty.json", "", "", "is empty"),
        ("blank.jsonl", " \n", "", "is empty"),
        ("a.json", "[{", "line 1", "property name"),
        ("a.json", faulty()[:-9], "line 1", "(Unterminated|Expecting)"),
        ("a.json", faulty()[:-1], "line 1", "ends within its array"),
        ("a.json", '[{"title": "x"}]', r"conversation 1 \(line 1\)", "'mapping'"),
        ("a.json", json.dumps([USER]), r"conversation 1 \(line 1\)", "one object per line"),
        ("a.json", '[{"messages": []}]', r"conversation 1 \(line 1\)", "one object per line"),
        ("a.json", json.dumps({"messages": [USER]}, indent=1), "line 1", "one object per line"),
        ("a.jsonl", json.dumps(USER, indent=1) * 2, "line 1", "one object per line"),
        ("a.json", "[5]", "conversation 1", "it is 5: expected an object$"),
        ("a.json", faulty(author={"role": "robot"}), "conversation 2 .*message 'u'", "robot"),
        ("a.json", faulty(author={"role": ["user"]}), "conversation 2 .*message 'u'", "role"),
        ("a.json", faulty(content="hello"), "conversation 2 .*message 'u'", "content"),
        ("a.json", faulty(content={"parts": "hello"}), "conversation 2 .*message 'u'", "parts"),
        ("a.json", faulty(content={"parts": 5}), "conversation 2 .*message 'u'", "parts"),
        ("a.jsonl", second(thread_id="c")[:-2], "line 2", "Unterminated"),
        ("a.jsonl", second(role="robot"), "line 2", '"robot"'),
        ("a.jsonl", second(role=["user"]), "line 2", "role"),
        ("a.jsonl", second(content=5), "line 2", "content is 5"),
        ("a.jsonl", second(content=None), "line 2", "content is missing"),
        ("a.jsonl", '{"role": "user"}', "line 1", "content is missing"),
        ("a.jsonl", '{"role": "assistant"}', "line 1", "content is missing"),
        ("a.jsonl", second(content=["x", 5]), "(line 2|message 1 of 'a')", "content"),
        ("a.jsonl", second(messages="hello"), "line 2", "not a list"),
        ("a.jsonl", second(role="tool"), "(line 2|message 1 of 'a')", "tool_call_id"),
        (
            "a.jsonl",
            f'{{"thread_id": "b", "role": "tool", "content": ""}}\n{second()}',
            "line 1",
            "tool_call_id",
        ),
        ("a.jsonl", second(role="assistant", tool_calls="x"), "line 2", "tool_calls"),
        ("a.jsonl", called(arguments="{m:"), "line 1", "tool_calls: the arguments .*not JSON"),
        ("a.jsonl", called(arguments="[]"), "line 1", "tool_calls"),
        ("a.jsonl", called(), "line 1", "tool_calls"),
        ("a.jsonl", second(role="assistant", tool_calls=[{}]), "line 2", "tool_calls: expected"),
        ("a.jsonl", second(role="function", name="f"), "line 2", "'f' follows no function_call"),
        ("a.jsonl", second(role="assistant", function_call=5), "line 2", "function_call is 5"),
        ("a.jsonl", second(thread_id="c", messages=[USER]), "line 2", "'c' is on line 1 already"),
        ("a.jsonl", "{}\n[1]", "line 1", "role"),
    ],
)
def test_a_malformed_file_is_named_with_place_and_reason(
    name: str, text: str, where: str, why: str, tmp_path: Path
) -> None:
    """One line says which file, where in it and why, and it names no class of ours."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    result = run(tmp_path / "x.db", "import", str(tmp_path / name))

    assert isinstance(result.exception, ImportFailed)
    assert re.search(f"{name}'.*{where}.*{why}", str(result.exception))
    assert not re.search(r"_[A-Z]|\n", str(result.exception))


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("a.json", faulty(content=5), r"\. 1 conversation \(1 new message, .* that are kept$"),
        ("a.jsonl", second(role="robot"), r"\. 1 conversation \(1 new message, .* are kept$"),
        ("a.jsonl", '{"role": "user"}', None),
    ],
)
def test_a_failed_import_says_what_is_kept(
    name: str, text: str, kept: str | None, tmp_path: Path
) -> None:
    """What came before the fault is counted; if nothing did, there is no database either."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    result = run(tmp_path / "x.db", "import", str(tmp_path / name))

    assert bool(kept) == bool(re.search(kept or "kept", str(result.exception)))
    assert (tmp_path / "x.db").exists() == bool(kept)


@pytest.mark.parametrize(
    ("name", "why"), [("bytes.jsonl", "not UTF-8"), (".", "directory"), ("gone.json", "No such")]
)
def test_an_unreadable_file_is_named(name: str, why: str, tmp_path: Path) -> None:
    """Another encoding, a folder and a missing file are told apart."""
    (tmp_path / "bytes.jsonl").write_bytes(b'{"role": "user", "content": "caf\xe9"}')
    result = run(tmp_path / "x.db", "import", str(tmp_path / name))

    assert isinstance(result.exception, ImportFailed)
    assert re.search(f"{tmp_path / name}.*{why}", str(result.exception))
    assert not (tmp_path / "x.db").exists()


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container within a JSON value, with each of its keys."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else []
    )
    return [p for key in keys for p in [(value, key), *places(value[key])]]


@given(st.data())
def test_no_change_of_an_export_breaks_the_importer(data: st.DataObject) -> None:
    """With anything in the place of any value, the file is imported or refused, never a crash."""
    changed = [copy.deepcopy(CONVERSATIONS[0])]
    within, key = data.draw(st.sampled_from(places(changed)))
    within[key] = data.draw(st.sampled_from([None, 5, 0.5, True, "", "x", [], ["x"], {}, {"x": 1}]))
    with tempfile.TemporaryDirectory() as folder:
        file = written(Path(folder) / "c.json", changed)
        result = run(Path(folder) / "x.db", "import", str(file))

    assert result.exception is None or isinstance(result.exception, ImportFailed)
