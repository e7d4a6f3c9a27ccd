"""The output of commands on a terminal of 80 columns: tables, answers, help and errors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from perdure.cli import main
from perdure.cli.output import get_console, print_arriving_text_and_check_if_any
from tests.cli.commands import invoke, join_first_cells, run, run_and_read_error, run_json
from tests.cli.talk import say_on_thread
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
TABLE_COMMANDS = {
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
def database_with_long_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database with threads, memories and items that have long and similar names."""
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
        invoke("memories", "add", card)  # is put into quarantine
        run("store", "put", PLACE, "seat-in-the-aeroplane-preferred", "--text", SEAT)
        run("store", "put", "users/bob", "seat", "--text", SEAT)
        say_on_thread(WAITS, "hello")
    return folder / "x.db"


@pytest.fixture
def filled_database(database_with_long_names: Path, db: Path) -> None:
    """Copy the rows with long names into the database that commands use."""
    shutil.copy(database_with_long_names, db)


@pytest.mark.usefixtures("filled_database")
@pytest.mark.parametrize("command", TABLE_COMMANDS)
def test_table_fits_80_columns_and_shows_enough_of_long_texts(command: str, terminal: Any) -> None:
    """Only a line that is a single id may be longer than the terminal."""
    shown = [line.rstrip() for line in terminal(*command.split()).splitlines()]
    cut = [cell_len(cell) for line in shown for cell in re.split("  +(?!…)", line) if "…" in cell]

    assert len(shown) >= 1
    assert [line for line in shown if cell_len(line) > 80 and line not in (LONG, PLACE, KEY)] == []
    assert min(cut, default=80) >= TABLE_COMMANDS[command]


@pytest.mark.usefixtures("filled_database")
def test_threads_shows_unique_prefix_of_id_on_terminal(terminal: Any) -> None:
    """An id is whole with --ids, in a pipe, and if it differs from another only at the end."""
    shown = join_first_cells(terminal("threads"))
    whole, piped = join_first_cells(terminal("threads", "--ids")), run("threads")

    assert {UUID, TWIN} < {*shown}
    assert not any(LONG in cell or "7ea1f2aa-" in cell for cell in shown)
    assert [title in terminal("history", "7ea1f2aa") for title in TITLES.values()].count(True) == 1
    assert all(thread in whole and thread in piped for thread in TITLES)


@pytest.mark.usefixtures("filled_database")
def test_memory_keys_are_shown_only_by_ids_option_and_json(terminal: Any) -> None:
    """`list` and `search` show keys with --ids; JSON always has them."""
    plain = terminal("memories", "list"), run("memories", "list"), run("memories", "search", "figs")
    whole = run("memories", "list", "--ids"), run("memories", "search", "Ghent", "--ids")
    broken = terminal("memories", "list", "--ids")

    assert not any(KEY in shown for shown in plain)
    assert all(KEY in shown for shown in whole)
    assert KEY[:20] in broken
    assert KEY[-5:] in broken
    assert KEY in [memory["key"] for memory in run_json("memories", "list")]


# -- times


@pytest.mark.usefixtures("filled_database")
def test_shown_time_of_version_has_zone_and_is_accepted_by_as_of(terminal: Any) -> None:
    """The time of a version that `history` prints is a valid value of --as-of."""
    for words in (["memories", "history", KEY], ["store", "history", "users/bob", "seat"]):
        (at,) = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d\S*", terminal(*words))

        assert at.endswith("Z")
        assert invoke("memories", "list", "--as-of", at).exit_code == 0


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
def test_printed_stream_is_wrapped_between_words(
    size: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result does not depend on the parts of the stream; lines of code are not wrapped."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    get_console.cache_clear()
    print_arriving_text_and_check_if_any(
        ANSWER[at : at + size] for at in range(0, len(ANSWER), size)
    )
    get_console.cache_clear()
    shown = COLOR.sub("", capsys.readouterr().out)
    words = [word for word in ANSWER.split() if cell_len(word) <= 80]

    assert [line for line in shown.splitlines() if cell_len(line) > 80] == [CODE]
    assert "".join(shown.split()) == "".join(ANSWER.split())
    assert [word for word in words if word not in shown.split()] == []
    assert shown.count("\n\n") == 1


def test_answer_of_chat_is_wrapped_between_words(
    terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the line of code is longer than the terminal."""
    with OpenAIServer([ANSWER]) as server:
        monkeypatch.setenv("PERDURE_MODEL", "scripted")
        monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)
        shown = terminal("chat", "-t", "t", "-m", "hello")

    assert [line for line in shown.splitlines() if cell_len(line) > 80] == [CODE]


# -- how it is called


@pytest.mark.parametrize("words", [[], ["memories"], ["store"]])
def test_group_without_command_prints_its_help_and_exits_with_2(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is that of --help, and is printed once."""
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
def test_option_before_command_is_refused_with_its_right_place(
    words: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says where the option belongs, also for a command of a group."""
    option = next(word for word in words if word.startswith("--"))

    assert run_and_read_error(*words, capsys=capsys) == (
        f"No such option: {option}; put the options of a command after its name: "
        f"{command} COMMAND {option}\n"
    )


def test_error_on_terminal_is_wrapped_between_words(terminal: Any) -> None:
    """On a terminal an error has lines of at most 80 columns."""
    shown = terminal("history", "nothing", "--db", "there-is-no-such-file-of-a-database-here.db")

    assert len(shown.splitlines()) > 1
    assert max(map(len, shown.splitlines())) <= 80
    assert "'there-is-no-such-file-of-a-database-here.db'" in shown


# -- a chat that is typed


def test_chat_prints_its_model_and_how_to_leave(
    terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first lines name the model or say that there is none; /help prints help."""
    without = terminal("chat", "-t", "t", stdin="/help\n/quit\n")
    monkeypatch.setenv("PERDURE_MODEL", "scripted")
    monkeypatch.setenv("PERDURE_BASE_URL", "http://someone:secret@127.0.0.1:9/v1")
    configured = terminal("chat", "-t", "t", stdin="/quit\n")

    assert without.splitlines()[0].startswith("perdure chat: ")
    assert "No model is configured" in without
    assert "PERDURE_MODEL" in without
    assert "/help prints help, /quit or Ctrl-D ends the chat." in without
    assert "  /quit  end the chat" in without
    assert "'perdure history t'" in without
    assert "The model is 'scripted' at 127.0.0.1:9." in configured
    assert "thread 't' is new" in configured
    assert max(map(cell_len, (without + configured).splitlines())) <= 80
