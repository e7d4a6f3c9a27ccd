"""What the commands show on a terminal of 80 columns: tables, answers, help and errors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from perdure.cli import main
from perdure.cli.output import get_console, print_stream
from tests.cli.commands import attempt, error, folded, read, run
from tests.cli.talk import say
from tests.cli.terminal import COLOR
from tests.openai_server import OpenAIServer

UUID = "68a1f2aa-7e1c-8001-9d5e-0c6b1a2b3c4d"
TWIN = "68a1f2aa-7e1c-8001-9d5e-0c6b1a2b3c4e"
LONG = "user:ann:session:2025-11-25T10:11:12:the-long-one-of-the-week"
WAITS = "01990f2aa-7e1c-8001-9d5e-0c6b1a2b3c4d"
TITLES = {
    "7ea1f2aa-7e1c-8001-9d5e-0c6b1a2b3c4d": "A conversation with a long title, of several trips",
    UUID: "One of two whose ids are the same but for the end",
    TWIN: "The other of two whose ids are the same but for the end",
    LONG: "One whose id alone is nearly as wide as the terminal is",
    "日本語のとても長いスレッドの識別子です": "日本語のタイトルが長いときに表がどうなるかを",
    "👩‍💻 emoji thread 🍞🍞🍞🍞": "🍞🥖🥐 a title with emoji 👩‍💻 that goes on and on and on",
    "trip": "Trip",
}
KEY = "a-key-that-somebody-made-up-by-hand-and-that-is-long"
PLACE = "users/alice-the-first-of-her-name/preferences/travel"
SEAT = "prefers a window seat in the front of the plane, on the left"
# commands that show a table, and how much of its longest text there is at least
TABLES = {
    "threads": 17,
    "threads --ids": 20,
    "memories list": 60,
    "memories list --ids": 30,
    "memories search figs": 24,
    "memories search figs --ids": 20,
    f"memories history {KEY}": 30,
    "memories quarantine": 18,
    "memories jobs": 10,
    "store search users": 25,
    "store search users seat": 23,
    f"store history {PLACE} seat-in-the-aeroplane-preferred": 30,
    "store namespaces": 40,
    "config": 4,
    "stats": 4,
    "retain --last 1 --dry-run": 4,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with threads, memories and items whose names are long, wide, and alike."""
    folder = tmp_path_factory.mktemp("whole")
    talks = [
        {
            **{"thread_id": thread, "title": title, "update_time": 1.75e9},
            "messages": [{"role": "user", "content": f"I like figs, I say in {title}"}],
        }
        for thread, title in TITLES.items()
    ]
    (folder / "x.jsonl").write_text("\n".join(map(json.dumps, talks)))
    card = "My card is 4111 1111 1111 1111, which I use for all shopping in town"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PERDURE_DB", str(folder / "x.db"))
        run("import", str(folder / "x.jsonl"))
        run("memories", "add", "--key", KEY, "Ann lives in Ghent, in a house with a tree of figs")
        attempt("memories", "add", card)  # is put into quarantine
        run("store", "put", PLACE, "seat-in-the-aeroplane-preferred", "--text", SEAT)
        run("store", "put", "users/bob", "seat", "--text", SEAT)
        say(WAITS, "hello")
    return folder / "x.db"


@pytest.fixture
def filled(whole: Path, db: Path) -> None:
    """The database of commands has these."""
    shutil.copy(whole, db)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("command", TABLES)
def test_a_table_fits_and_leaves_room_for_its_text(command: str, terminal: Any) -> None:
    """No line is longer than the terminal, but one that is an id; of a long text much is there."""
    shown = [line.rstrip() for line in terminal(*command.split()).splitlines()]
    cut = [cell_len(cell) for line in shown for cell in re.split("  +(?!…)", line) if "…" in cell]

    assert len(shown) >= 1
    assert [line for line in shown if cell_len(line) > 80 and line not in (LONG, PLACE, KEY)] == []
    assert min(cut, default=80) >= TABLES[command]


@pytest.mark.usefixtures("filled")
def test_an_id_is_shown_by_a_beginning_that_is_taken(terminal: Any) -> None:
    """It is whole with --ids, and in a pipe; where ids differ in the end, it is whole anyway."""
    shown = folded(terminal("threads"))
    whole, piped = folded(terminal("threads", "--ids")), run("threads")

    assert {UUID, TWIN} < {*shown}
    assert not any(LONG in cell or "7ea1f2aa-" in cell for cell in shown)
    assert [title in terminal("history", "7ea1f2aa") for title in TITLES.values()].count(True) == 1
    assert all(thread in whole and thread in piped for thread in TITLES)


@pytest.mark.usefixtures("filled")
def test_keys_of_memories_are_shown_when_they_are_asked_for(terminal: Any) -> None:
    """`list` and `search` have them with --ids, and JSON always."""
    plain = terminal("memories", "list"), run("memories", "list"), run("memories", "search", "figs")
    whole = run("memories", "list", "--ids"), run("memories", "search", "Ghent", "--ids")
    broken = terminal("memories", "list", "--ids")

    assert not any(KEY in shown for shown in plain)
    assert all(KEY in shown for shown in whole)
    assert KEY[:20] in broken
    assert KEY[-5:] in broken
    assert KEY in [memory["key"] for memory in read("memories", "list")]


# -- times


@pytest.mark.usefixtures("filled")
def test_times_name_their_zone_and_are_taken(terminal: Any) -> None:
    """What a version's time is shown as, --as-of takes."""
    for words in (["memories", "history", KEY], ["store", "history", "users/bob", "seat"]):
        (at,) = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d\S*", terminal(*words))

        assert at.endswith("Z")
        assert attempt("memories", "list", "--as-of", at).exit_code == 0


# -- answers


CODE = "a line of code that is much longer than the terminal is wide, with no break of ours in it"
ANSWER = (
    "A streamed answer is broken between words, wherever they end, so that nothing is cut apart "
    "in the middle.\n\n- an item of a list that is longer than the line of the terminal, which "
    "goes on\n"
    f"```\n{CODE}\n```\n"
    "今日は天気がとても良いので、公園まで歩いて行って、そこで昼ご飯を食べてから帰ります。"
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_broken_between_words(
    size: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However its parts are cut; its code has the lines that it had."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    get_console.cache_clear()
    print_stream(ANSWER[at : at + size] for at in range(0, len(ANSWER), size))
    get_console.cache_clear()
    shown = COLOR.sub("", capsys.readouterr().out)
    words = [word for word in ANSWER.split() if cell_len(word) <= 80]

    assert [line for line in shown.splitlines() if cell_len(line) > 80] == [CODE]
    assert "".join(shown.split()) == "".join(ANSWER.split())
    assert [word for word in words if word not in shown.split()] == []
    assert shown.count("\n\n") == 1


def test_a_streamed_answer_is_broken_between_words(
    terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chat as well."""
    with OpenAIServer([ANSWER]) as server:
        monkeypatch.setenv("PERDURE_MODEL", "scripted")
        monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)
        shown = terminal("chat", "-t", "t", "-m", "hello")

    assert [line for line in shown.splitlines() if cell_len(line) > 80] == [CODE]


# -- how it is called


@pytest.mark.parametrize("words", [[], ["memories"], ["store"]])
def test_a_group_without_a_command_shows_its_help_once(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As --help does, and it is an error."""
    monkeypatch.setattr("sys.argv", ["perdure", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()

    assert (ended.value.code, out) == (2, "")
    assert err == run(*words, "--help")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--db", "x", "threads"], "perdure"),
        (["memories", "--user", "x", "list"], "perdure memories"),
    ],
)
def test_an_option_before_its_command_is_told_where_it_stands(
    words: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the options of all commands, also of those in a group."""
    option = next(word for word in words if word.startswith("--"))

    assert error(*words, into=capsys) == (
        f"No such option: {option}; put the options of a command after its name: "
        f"{command} COMMAND {option}\n"
    )


def test_errors_are_broken_between_words(terminal: Any) -> None:
    """On a terminal; in a pipe they are a line."""
    shown = terminal("history", "nothing", "--db", "there-is-no-such-file-of-a-database-here.db")

    assert len(shown.splitlines()) > 1
    assert max(map(len, shown.splitlines())) <= 80
    assert "'there-is-no-such-file-of-a-database-here.db'" in shown


# -- a chat that is typed


def test_a_chat_says_what_it_is_and_how_to_leave(
    terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model, or that there is none; /help says more, and is no message."""
    without = terminal("chat", "-t", "t", typed="/help\n/quit\n")
    monkeypatch.setenv("PERDURE_MODEL", "scripted")
    monkeypatch.setenv("PERDURE_BASE_URL", "http://someone:secret@127.0.0.1:9/v1")
    configured = terminal("chat", "-t", "t", typed="/quit\n")

    assert without.splitlines()[0].startswith("perdure chat: ")
    assert "No model is configured" in without
    assert "PERDURE_MODEL" in without
    assert "/help prints help, /quit or Ctrl-D ends the chat." in without
    assert "  /quit  end the chat" in without
    assert "'perdure history t'" in without
    assert "The model is 'scripted' at 127.0.0.1:9." in configured
    assert "thread 't' is new" in configured
    assert max(map(cell_len, (without + configured).splitlines())) <= 80
