"""`perdure import` of Claude's export: blocks, attachments, branches, memories and projects."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.cli.importing import claude
from perdure.stores import SQLiteStore
from tests.cli.commands import invoke, run, run_and_read_error, run_json
from tests.cli.exports import (
    build_claude_conversation,
    build_claude_files,
    build_zip,
    write_json,
)
from tests.cli.imported import (
    import_and_read_problems,
    import_as_earlier_version,
    read_current_messages,
    read_memory_texts,
    read_thread_texts,
    search_thread_texts,
)


def test_claude_export_is_imported_with_texts_files_and_titles(tmp_path: Path) -> None:
    """Pasted text is the user's own, files and tools are not remembered, thoughts are left out."""
    conversations = [build_claude_conversation(), build_claude_conversation("other", name="")]
    (tmp_path / "data.zip").write_bytes(
        build_zip({"conversations.json": conversations, "users.json": []})
    )
    report = run_json("import", "data.zip")

    assert (report["conversations"], report["left_out"]) == (2, {"thinking": 2, "tool_result": 2})
    assert read_thread_texts("pond") == [
        "human: [file: pond.txt]\n```\n2 m\n3 m\n```",
        "human: pasted: it has carps",
        "human: [file: pond.png]",
        "human: How deep is this pond?",
        "ai: Let me look.",
        "ai: [web_search: pond depth]",
        "ai: Three metres.",
        "ai: [artifact: Pond plan]\n<svg/>",
        "human: Thank you for that",
    ]
    assert not [text for text in read_memory_texts() if "[" in text or "2 m" in text]
    with SQLiteCheckpointer.open("x.db") as saver:
        assert saver.thread("pond").active_at.isoformat() == "2024-05-01T10:02:00.123456+00:00"
        assert saver.checkpoints("pond")[0].metadata["title"] == "The pond"


def test_edited_question_of_claude_is_a_branch_and_faults_are_named(tmp_path: Path) -> None:
    """The edited question is a branch, and each broken message is named."""
    talk = build_claude_conversation()
    again = {**talk["chat_messages"][2], "uuid": "again", "text": "Is it?"}
    odd = [5, {**again, "uuid": "odd", "sender": "robot"}]
    blocks = {**again, "uuid": "blocks", "content": [{"type": "hologram"}, {"type": "text"}]}
    talk["chat_messages"] += [again, *odd, blocks]
    talk["current_leaf_message_uuid"] = "again"
    file = write_json(tmp_path / "c.json", [talk, {"uuid": "none", "chat_messages": 5}])

    assert [reason for reason, _ in import_and_read_problems(file)] == [
        "the message is not a JSON object",
        "unknown sender 'robot'",
        "unknown content 'hologram'",
        "no content",
        "'chat_messages' is not a list",
    ]
    assert read_thread_texts("pond")[-2:] == ["ai: [artifact: Pond plan]\n<svg/>", "human: Is it?"]


BIRDS = (  # noqa: SIM905
    "heron egret bittern osprey plover kestrel dunlin avocet curlew godwit"
).split()


def test_claude_artifacts_and_attachments_are_searchable(tmp_path: Path) -> None:
    """Artifacts, files and code become messages; pasted text is the user's own, and a memory."""
    (tmp_path / "e.zip").write_bytes(build_zip(build_claude_files()))
    report = run_json("import", "e.zip")

    assert read_thread_texts("birds") == [
        "human: [file: notes.pdf]\n```\na printed godwit\n```",
        "human: my own curlew",
        "human: Look",
        "ai: Here you are.",
        "ai: " + "\n\n".join([
            "[artifact: Plan]\n# Heron\n\nlines of a heron",
            "[artifact changed: plan]\nan egret",
            "[artifact changed: plan]\nonly a bittern",
            "[create_file: /mnt/a.py]\n```py\nprint('osprey')\n```",
            "[str_replace: /mnt/a.md]\none plover",
            "[repl]\n```javascript\nconst kestrel = 1\n```",
            "[bash_tool: List files]\n```bash\nls /dunlin\n```",
            "[web_search: pond depth]",
            '[broken_off]\n{"code": "a redshank',
            "[message_compose]\nBirds\nDear avocet",
        ]),
    ]  # fmt: skip
    assert {bird: bool(search_thread_texts(bird)) for bird in BIRDS} == dict.fromkeys(BIRDS, True)
    assert "user: my own curlew" in read_memory_texts()
    assert not [text for text in read_memory_texts() if "godwit" in text or "[" in text]
    assert report["left_out"] == {"tool_result": 10, "arguments of message_compose": 1}


def test_claude_memories_and_project_documents_are_imported(tmp_path: Path) -> None:
    """Documents become items of their project, and files that are not read are named."""
    (tmp_path / "e.zip").write_bytes(build_zip(build_claude_files()))
    first = invoke("import", "e.zip")
    again = run_json("import", "e.zip")
    (tmp_path / "folder").mkdir()
    for name, value in build_claude_files().items():
        part = f"{name.partition('.')[0].partition('/')[0]}-000.zip"
        (tmp_path / "folder" / part).write_bytes(build_zip({name: value}))
    parts = run_json("import", "folder", "--db", "parts.db")
    quiet = run_json("import", "e.zip", "--db", "quiet.db", "--no-memories")
    with SQLiteStore.open("x.db") as store:
        documents = {i.key: i.value for i in store.search(("projects", "me", "proj"), limit=9)}

    assert first.stdout.startswith("2 conversations: 7 new messages, 2 new items, ")
    assert first.stderr.endswith("files that were not read: users.json\n")
    assert {
        text for text in read_memory_texts() if "user" not in text and "assistant" not in text
    } == {
        *("Work context: Ann counts sandpipers.", "Personal: She lives in Ghent.", "Curt"),
    }
    assert (again["messages"], again["items"], again["memories"]) == (0, 0, 0)
    assert documents["doc"] == {
        "project": "Birds", "title": "birds.md", "text": "# All birds\n\nwhimbrel"
    }  # fmt: skip
    assert documents["instructions"]["text"] == "Be brief"
    assert (parts["messages"], parts["items"]) == (7, 2)
    assert quiet["left_out"]["memory of the export"] == 3
    assert read_thread_texts("d") == ["ai: A page of terns", "ai: [write_file]\n<tern/>"]


def test_manifest_of_links_names_files_to_download(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone the manifest is an error; next to conversations it is reported as skipped."""
    names = ["light_metadata-000.zip", "conversations-000.zip"]
    links = [{"filename": name, "export_url": "https://secret.example/x"} for name in names]
    manifest = write_json(tmp_path / "m.json", {"total_files": 2, "data_files": links})
    message = run_and_read_error("import", str(manifest), capsys=capsys)
    (tmp_path / "folder").mkdir()
    write_json(tmp_path / "folder" / "m.json", {"data_files": links})
    (tmp_path / "folder" / names[1]).write_bytes(
        build_zip({"conversations.json": [build_claude_conversation()]})
    )
    report = run_json("import", "folder")

    assert "download light_metadata-000.zip, conversations-000.zip from them" in message
    assert "secret" not in message
    assert report["conversations"] == 1
    assert "conversations-000.zip" in report["skipped"][0]["reason"]


def test_import_completes_claude_import_of_an_earlier_version(tmp_path: Path) -> None:
    """Documents are added to their messages, and pasted text becomes a memory, each once."""
    file = write_json(tmp_path / "c.json", build_claude_files()["conversations.json"])
    import_as_earlier_version(file, claude.build_claude_conversation)
    before = read_memory_texts()
    first, again = run_json("import", str(file)), run_json("import", str(file))
    run("import", str(file), "--db", "fresh.db")

    assert first["messages"] == again["messages"] == again["updated"] == 0
    assert first["updated"] > 0
    assert read_current_messages("birds")[-1] == read_current_messages("birds", "fresh.db")[-1]
    assert set(read_memory_texts()) - set(before) == {"user: my own curlew"}
    assert {bird: bool(search_thread_texts(bird)) for bird in BIRDS} == dict.fromkeys(BIRDS, True)
    with SQLiteCheckpointer.open("x.db") as saver:
        assert not [item for item in saver.history("birds") if item.branch]
