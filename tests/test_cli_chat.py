"""`perdure chat`: talking, resuming, and going on after the process was killed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata

import perdure.cli
from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import PerdureError
from perdure.graphs import chat_graph
from perdure.graphs.responder import NOTICE
from tests.exports import run
from tests.openai_server import PATIENCE, Failure, Held, OpenAIServer

COMMAND = [sys.executable, "-c", "from perdure.cli import main; main()"]


def environment(db: Path, server: OpenAIServer | None = None, **more: str) -> dict[str, str]:
    settings = {**os.environ, "PERDURE_DB": str(db), "PYTHONIOENCODING": "utf-8", **more}
    if server is not None:
        settings |= {"PERDURE_MODEL": "scripted", "PERDURE_BASE_URL": server.base_url}
    return settings


def perdure_process(
    environ: dict[str, str], *arguments: str, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environ,
        input=typed,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
    )


def use(monkeypatch: pytest.MonkeyPatch, server: OpenAIServer) -> None:
    monkeypatch.setenv("PERDURE_MODEL", "scripted")
    monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)


def chat(db: Path, *options: str) -> tuple[str, str]:
    """What a chat on thread t prints: the answers, and the notes."""
    result = run(db, "chat", "--thread", "t", *options)
    assert (result.exception, result.exit_code) == (None, 0), result.output
    return result.stdout, result.stderr


def said(db: Path) -> list[str]:
    with SQLiteCheckpointer.open(db) as saver:
        return [item.value.text for item in saver.history("t")]


# -- talking


def test_a_message_is_answered_by_the_configured_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The answer alone is on stdout, and the next run of the command shows the model all of it."""
    with OpenAIServer(["one", "two"]) as server:
        use(monkeypatch, server)
        monkeypatch.setenv("PERDURE_API_KEY", "any")
        first = chat(tmp_path / "x.db", "-m", "hello")
        second = chat(tmp_path / "x.db", "-m", "again")

    assert first == ("one\n", "thread 't' is new\n")
    assert second[0] == "two\n"
    assert server.shown() == [("user", "hello"), ("assistant", "one"), ("user", "again")]
    assert server.requests[0]["model"] == "scripted"


def test_without_a_model_the_chat_says_so(tmp_path: Path) -> None:
    """The offline answer names the setting that brings a model."""
    answer, _ = chat(tmp_path / "x.db", "-m", "hello")

    assert NOTICE in answer
    assert "PERDURE_MODEL" in NOTICE


def test_resuming_shows_where_the_thread_stands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The notes count what is said, seen and only history, and repeat the last messages."""
    db = tmp_path / "x.db"
    with OpenAIServer(["a", "b", "c", "d"]) as server:
        use(monkeypatch, server)
        for text in ("1", "2", "3"):
            chat(db, "--keep-last", "2", "-m", text)
        _, notes = chat(db, "--keep-last", "2", "-m", "4")

    assert notes.split("\n")[0].startswith("thread 't': 6 messages said, the model sees 2, 4 are")
    assert notes.split("\n")[-5:] == ["○ human: 2", "○ ai: b", "● human: 3", "● ai: c", ""]
    assert [text for role, text in server.shown() if role != "system"] == ["3", "c", "4"]


def test_after_an_error_of_the_model_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The question that had no answer is answered when the chat is started again."""
    db = tmp_path / "x.db"
    with OpenAIServer([Failure(400, "out of order"), "late", "next"]) as server:
        use(monkeypatch, server)
        failed = run(db, "chat", "--thread", "t", "-m", "first")
        answers, notes = chat(db, "-m", "second")

    assert "out of order" in str(failed.exception)
    assert "the last turn was cut off; finishing it" in notes
    assert answers == "late\nnext\n"
    assert said(db) == ["first", "late", "second", "next"]


@pytest.mark.parametrize(("option", "value"), [("--keep-last", "0"), ("--thread", "")])
def test_a_chat_with_wrong_options_says_nothing(option: str, value: str, tmp_path: Path) -> None:
    """A window of nothing and an empty thread id are refused before anything is stored."""
    result = run(tmp_path / "x.db", "chat", "--thread", "t", option, value, "-m", "hello")

    assert isinstance(result.exception, PerdureError)
    assert json.loads(run(tmp_path / "x.db", "threads", "--json").stdout) == []


# -- processes of their own


def test_a_chat_may_be_piped_in(tmp_path: Path) -> None:
    """Each line that is not blank is a turn, until /quit, whatever follows it."""
    db = tmp_path / "x.db"
    with OpenAIServer(lambda body: f"heard {body['messages'][-1]['content']}") as server:
        done = perdure_process(
            environment(db, server), "chat", "-t", "t", typed="one\n\n  two \n/quit\nthree\n"
        )

    assert (done.returncode, done.stdout) == (0, "heard one\nheard two\n")
    assert done.stderr == "thread 't' is new\n"
    assert said(db) == ["one", "heard one", "two", "heard two"]


def test_a_chat_that_was_killed_finishes_its_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SIGKILL while the model thinks: started again, the chat answers what was asked, once."""
    db, let_go = tmp_path / "x.db", threading.Event()
    with OpenAIServer(["hello", Held("too late", let_go), "now then", "bye"]) as server:
        use(monkeypatch, server)
        chat(db, "-m", "hi")
        server.asked.clear()
        killed = subprocess.Popen(
            [*COMMAND, "chat", "-t", "t", "-m", "a long story"],
            env=environment(db, server),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        asked = server.asked.wait(PATIENCE)
        killed.kill()
        killed.wait()
        let_go.set()
        between = said(db)
        again = perdure_process(environment(db, server), "chat", "-t", "t", "-m", "enough")

    assert asked
    assert between == ["hi", "hello", "a long story"]
    assert (again.returncode, again.stdout) == (0, "now then\nbye\n")
    assert "the last turn was cut off; finishing it" in again.stderr
    assert server.shown(1) == server.shown(2)
    assert said(db) == ["hi", "hello", "a long story", "now then", "enough", "bye"]


class Dies(SQLiteCheckpointer):
    """A process that ends once an answer is stored and before the checkpoint that holds it."""

    def put(
        self,
        config: Any,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> Any:
        if metadata["step"] == 1:
            raise KeyboardInterrupt
        return super().put(config, checkpoint, metadata, new_versions)


def test_an_answer_that_was_stored_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The answer was acknowledged as a pending write, so the chat that is started again has it."""
    config: Any = {"configurable": {"thread_id": "t"}}
    with Dies.open(tmp_path / "x.db") as saver:
        asked: Any = {"messages": [{"role": "user", "content": "My cat is called Pixel"}]}
        with pytest.raises(KeyboardInterrupt):
            chat_graph(checkpointer=saver).invoke(asked, config, durability="sync")
        found = saver.get_tuple(config)
    assert found is not None
    ((answer,),) = [value for _, name, value in found.pending_writes or [] if name == "messages"]
    with OpenAIServer(["noted"]) as server:
        use(monkeypatch, server)
        chat(tmp_path / "x.db", "-m", "My dog is called Comma")

    assert said(tmp_path / "x.db") == [
        *("My cat is called Pixel", answer.text, "My dog is called Comma", "noted"),
    ]


def test_a_process_ends_with_one_line_on_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real process exits with 2 and says what was wrong on stderr, without a traceback."""
    db = tmp_path / "x.db"
    monkeypatch.setenv("PERDURE_KEY", "ab" * 32)
    chat(db, "-m", "hi")
    wrong = perdure_process(environment(db, PERDURE_KEY="cd" * 32), "threads")

    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == f"perdure: the key does not open {str(db)!r}\n"


def test_the_console_script_is_the_command_line() -> None:
    """What is installed as `perdure` is main()."""
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="perdure")

    assert script.load() is perdure.cli.main
