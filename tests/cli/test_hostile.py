"""No command lets stored text control the terminal or hide in the output.

Every text in the database is hostile. Every command runs on a terminal and into a pipe, with --json
and without; a new command without a case in `CASES` fails a test.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.cli import main
from perdure.cli.app import app
from perdure.cli.store import format_namespace
from perdure.graphs import chat_graph
from perdure.run_tables.crons import CronTable
from perdure.run_tables.records import CronRow, LiveRun, RunRow
from perdure.run_tables.runs import RunTable
from perdure.stores import Provenance, SQLiteStore
from tests.server_tables import open_table
from tests.store_backends import WordEmbedder

Terminal = Callable[..., str]

# a colour, the title of the window, the clipboard, a cursor, DEL, C1's CSI and OSC, NEL; then
# directions, joiners, a byte order mark, separators, fillers, tags, and a half of a pair
SPOKEN = (
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b]52;c;cm0gLXJm\x07 \x1b[2J\r\b\x00 \x7f "
    "\x9b31m \x9d0;t\x9c \x85 \u202e\u202d\u2066\u2069\u200e\u061c \u200b\u200d\u2060\ufeff "
    "\u2028\u2029 \u3164\u115f\u00ad \U000e0041\U000e007f [bold]markup[/bold] [link=x]y[/link]"
)
NAME = SPOKEN.replace("\x00", "")  # for texts that cannot contain NUL
NONE = f"no{NAME}\udc9b"  # a name that nothing has; an argument may contain any byte
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
# codes that rich writes to a terminal: colours, and for progress those that move the cursor
DRAWN = re.compile(r"\r?\x1b\[(?:[\d;]*m|\?25[lh]|1A|2K)")

THREAD, MESSAGE, KEY, USER = f"t {NAME}", f"m {NAME}", f"k {NAME}", f"u {NAME}"
FILE = NAME.replace("/", "") + ".jsonl"
LABEL = f"l {NAME}"
PLACE = format_namespace((LABEL,))
VALUE = json.dumps({SPOKEN: [SPOKEN]})

# for each command, the arguments of its runs; a comment gives the reason for a run
CASES: dict[str, list[list[str]]] = {
    "threads": [[], ["t "], [NAME], [NONE]],
    "history": [["t "], ["t ", "--channel", NAME], [NONE], ["t ", "--checkpoint", NAME]],
    "show": [["t "], [NONE], ["x"]],  # several ids begin with x
    "fork": [["t ", f"copy {NAME}"], ["t ", THREAD], ["t ", "y", "--at", NAME]],
    "rewind": [["t ", "--to", NAME], ["t ", "--to", ""]],
    "delete": [["t "], [NONE], ["x1", "x2", "--yes"]],  # the first is asked, and told no
    "stats": [[], ["--db", f"no{NAME}.db"]],
    "store put": [[PLACE, KEY, VALUE], [NAME, "k", NAME], [f"/{NAME}", "k", "{}"]],
    "store get": [[PLACE, "k "], [PLACE, NAME], [PLACE, "k ", "--as-of", NAME]],
    "store search": [
        ["/"],
        ["/", NAME],
        ["/", "red", "--filter", '{"x": {"$ne": 1}}'],
        ["/", NAME, "--mode", "text"],
        [PLACE, "--filter", f'{{"{NAME}'],
        ["/", "--filter", json.dumps({"x": {f"${NAME}": 1}})],
        [f"nowhere{NAME}"],
    ],
    "store history": [[PLACE, "k "], [PLACE, NAME]],
    "store namespaces": [[]],
    "store delete": [[PLACE, "other"], [PLACE, NAME], [PLACE, "k ", "--if-version", "9"]],
    "store forget": [["/", "--query", "red"], ["/", "--dry-run"]],
    "store reembed": [[]],
    "chat": [["-t", "t ", "-m", NAME], ["-t", "t ", "-m", "red"], ["-t", NAME, "-m", "hi"]],
    "import": [["chat.json"], ["bad.jsonl"], [f"no{NAME}.json"], [FILE]],
    "export": [["--all"], ["t "], [NONE]],
    "retain": [["--last", "1"], ["--idle-days", "0", "--dry-run"], [NONE, "--last", "1"]],
    "worker": [["--once"], ["--once", "--cron", NAME]],
    "copy": [
        ["--from", "x.db", "--to", f"c{NAME.replace('/', '')}.db"],
        ["--from", f"no{NAME}.db", "--to", "c.db"],
        ["--from", "x.db", "--to", "c.db", "--to-key-file", NONE],
    ],
    "forget": [["--user", NAME], ["--user", USER, "--dry-run"], ["--user", USER]],
    "answer": [
        ["t ", "respond", NAME],
        ["waits", NAME, "--graphs", "asks.json"],
        ["waits", "--answer", NAME, "--graphs", "asks.json"],
        ["waits", "respond", NAME, "--graphs", "asks.json"],
        [NONE, "approve", "--graphs", "asks.json"],
        ["t ", "approve", "--graphs", f"no{NAME}.json"],
        ["t ", "approve", "--url", f"http://{NAME}"],
    ],
    "runs": [[], ["--user", NAME], ["--thread", NONE], ["--thread", "t "]],
    "crons": [[], ["--user", NAME], ["--thread", NONE]],
    "keys list": [["--keys", "keys.toml"], ["--keys", f"no{NAME}.toml"]],
    "keys revoke": [
        ["--keys", "keys.toml", "--user", USER],  # it is asked, and told no
        ["--keys", "keys.toml", "--user", NAME],
        ["--keys", "keys.toml", "--hash", NAME],
        ["--keys", "keys.toml", "--user", USER, "--yes"],
    ],
    "serve": [["--keys", f"no{NAME}.toml"], ["--host", NAME], ["--new-key", NAME]],
    "mcp": [["--audit", f"no{NAME}/audit.jsonl"]],
    "config": [[]],
    "memories list": [[], ["--kind", NAME]],
    "memories search": [["red"], [NAME], ["red", "--min-score", "-1"]],
    "memories add": [[f"I like {NAME}"], ["my password is hunter2 " + NAME]],
    "memories forget": [["k "], [NONE], ["--query", "red"], ["--thread", "t "], ["--all"]],
    "memories history": [["k "], [NONE]],
    "memories quarantine": [[], ["k "], [NONE], ["k ", "--discard"]],
    "memories jobs": [[], ["--retry"]],
}
TEXT_ONLY = {"serve", "mcp", "fork", "rewind", "chat", "worker", "store delete", "export"}


def iter_command_names(typer_app: typer.Typer, prefix: str = "") -> Iterator[str]:
    """Yield the names of all commands of the program."""
    for command in typer_app.registered_commands:
        function: Any = command.callback
        yield prefix + (command.name or function.__name__.replace("_", "-"))
    for inner in typer_app.registered_groups:
        assert inner.typer_instance is not None
        yield from iter_command_names(inner.typer_instance, f"{inner.typer_instance.info.name} ")


def test_every_command_has_a_hostile_case() -> None:
    """A new command needs a case in `CASES`."""
    assert set(iter_command_names(app)) == set(CASES)


@pytest.fixture
def hostile_database(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill a database and files with hostile texts; the user's name is hostile as well."""
    monkeypatch.setenv("PERDURE_USER", USER)
    calls: Any = [{"name": NAME, "args": {SPOKEN: SPOKEN, "x": f"{SPOKEN}\n{SPOKEN}"}, "id": "c"}]
    response_metadata = {"model_name": SPOKEN, "create_time": SPOKEN}
    content_parts: Any = [{"type": "text", "text": SPOKEN}, {"type": SPOKEN}, SPOKEN]
    messages: list[AnyMessage] = [
        HumanMessage(SPOKEN, id=MESSAGE),
        HumanMessage(content_parts, id="h"),
        AIMessage(
            f"```\n{SPOKEN}\n```\n{SPOKEN}", tool_calls=calls, response_metadata=response_metadata
        ),
        ToolMessage(json.dumps({SPOKEN: SPOKEN}), tool_call_id="c", name=SPOKEN, id="r"),
    ]
    provenance = Provenance(thread_id=THREAD, message_ids=(MESSAGE,), actor=NAME, trust=NAME)
    with SQLiteCheckpointer.open(db) as saver:
        graph: Any = chat_graph(checkpointer=saver)
        for thread in (THREAD, f"x1 {NAME}", f"x2 {NAME}"):
            metadata = {"title": SPOKEN, "titled": True, "source": SPOKEN, "step": SPOKEN}
            config = {"configurable": {"thread_id": thread}, "metadata": metadata}
            graph.update_state(config, {"messages": messages}, as_node="respond")
            saver.rewind(thread, saver.checkpoints(thread)[0].checkpoint_id)
            graph.update_state(config, {"messages": [("human", SPOKEN)]}, as_node="respond")
    value: dict[str, Any] = {
        "text": f"red {SPOKEN}",
        "shown": f"red {SPOKEN}",
        "kind": NAME,
        "reason": NAME,
        "detail": NAME,
        NAME: SPOKEN,
    }
    value |= {
        "at": "2026-01-01T00:00:00+00:00",
        "key": KEY,
        "check": NAME,
        "role": NAME,
        "fields": {},
    }
    words: Any = WordEmbedder()
    with SQLiteStore.open(db, index={"embed": words, "dims": words.dims}) as store:
        for place in ((LABEL,), ("memories", USER), ("perdure", "quarantine", "memories", USER)):
            store.put(place, KEY, {"text": SPOKEN}, provenance=provenance)
            store.put(place, KEY, value, provenance=provenance)
            store.put(place, "other", value, provenance=provenance)
        words.embed = raise_hostile_error
        store.put((LABEL,), "late", value)
    line = {"namespace": [LABEL], "key": KEY, "value": {"x": SPOKEN}}
    Path("bad.jsonl").write_text(json.dumps(line) + '\n{"' + NAME + '": ', encoding="utf-8")
    Path(FILE).write_text(json.dumps({NAME: NAME}) + "\n", encoding="utf-8")
    Path("chat.json").write_text(json.dumps([build_hostile_conversation()]), encoding="utf-8")
    Path("check.jsonl").write_text(json.dumps({"question": NAME, "expected": [NAME]}) + "\n")
    Path("their.db").write_bytes(b"SQLite format 3\0" + SPOKEN.encode())
    key = f'user = {json.dumps(USER)}\nsha256 = "{"0" * 64}"\ntenant = {json.dumps(NAME)}'
    Path("keys.toml").write_text(f"[[keys]]\n{key}\n".replace("\x7f", "\\u007f"))
    Path("asks.json").write_text('{"graphs": {"asks": "tests.cli.test_hostile:asks"}}')
    with SQLiteCheckpointer.open(db) as saver:
        config = {"configurable": {"thread_id": f"waits {NAME}"}}
        asks.compile(checkpointer=saver).invoke({"messages": [("human", SPOKEN)]}, config)
        asyncio.run(store_run_and_cron(saver))


def ask(state: MessagesState) -> dict[str, Any]:
    """Ask a question, and repeat the answer."""
    return {"messages": [AIMessage(f"{interrupt(SPOKEN)} {SPOKEN}")]}


asks: Any = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask")


async def store_run_and_cron(saver: SQLiteCheckpointer) -> None:
    """Store a failed run of the server, and a cron."""
    table, now = open_table(RunTable, saver), time.time()
    live = LiveRun(THREAD, 0, 0, f"run {NAME}", "pending", "", NAME, 1, None)
    fields = {"assistant_id": NAME, "user": NAME, "person": NAME, "metadata": {}}
    row = RunRow(live, now, now, fields, request={})
    accepted, _ = await table.accept_run_and_list_live_run_ids(
        row, reject_if_busy=False, cancel_action=None
    )
    assert accepted is not None
    await table.end_run(accepted, "error", {"error": NAME, "message": SPOKEN})
    payload = {"assistant_id": NAME, "schedule": NAME, "timezone": NAME}
    content = {"payload": payload, "graph": NAME, "user": NAME, "metadata": {NAME: SPOKEN}}
    await open_table(CronTable, saver).create(
        CronRow(f"cron {NAME}", THREAD, now, now, now, content)
    )


def raise_hostile_error(texts: Any) -> Any:
    """Raise an error with hostile text, as an embedder that fails."""
    raise OSError(f"the model is away: {SPOKEN}")


def build_hostile_conversation() -> dict[str, Any]:
    """Build a conversation of ChatGPT's export with hostile texts and an unknown role."""
    content = {"content_type": "text", "parts": [SPOKEN]}
    nodes: dict[str, Any] = {}
    for key, parent, role in (("a", None, "user"), ("b", "a", "assistant"), ("c", "b", NAME)):
        message = {"id": key, "author": {"role": role, "name": NAME}, "content": content}
        nodes[key] = {"id": key, "message": message, "parent": parent, "children": []}
    return {"conversation_id": NAME, "title": SPOKEN, "mapping": nodes, "current_node": "c"}


def run_piped(monkeypatch: pytest.MonkeyPatch, *arguments: str, stdin: str = "") -> str:
    """Run the program with pipes, and return what it writes to stdout and stderr."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["perdure", *arguments])
        patched.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        for name in ("stdout", "stderr"):
            patched.setattr(sys, name, output)
        with pytest.raises(SystemExit):
            main()
    written = output.buffer.getvalue()
    assert "Traceback" not in written.decode()
    return str(written.decode())


@pytest.mark.usefixtures("hostile_database")
@pytest.mark.parametrize("command", CASES)
def test_no_command_prints_control_characters(
    command: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal gets only what rich draws, and a pipe no control; prompts and errors included."""
    monkeypatch.setattr("pydoc.pager", lambda text: sys.stdout.write(text))
    for case in CASES[command]:
        for as_json in ([], ["--json"]) if command not in TEXT_ONLY else ([],):
            words = [*command.split(), *as_json, *case]
            for output in (
                run_piped(monkeypatch, *words, stdin="n\n"),
                DRAWN.sub("", terminal(*words, stdin="n\n", color=True)),
            ):
                match = FORBIDDEN.search(output)
                context = (
                    "" if match is None else output[max(0, match.start() - 60) : match.end() + 9]
                )

                assert match is None, (words[:3], context)
                assert output


@pytest.mark.usefixtures("hostile_database")
def test_check_detects_unescaped_control_characters(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check fails for a command that prints stored text unescaped, and ignores colours."""
    monkeypatch.setattr("perdure.cli.output.escape_control_characters", str)
    shown = run_piped(monkeypatch, "history", "t "), terminal("threads", color=True)

    assert all(FORBIDDEN.search(DRAWN.sub("", text)) for text in shown)
    assert not DRAWN.sub("", "\x1b[1;32m\x1b[0m\x1b[?25l")
    assert all(DRAWN.sub("", text) for text in ("\x1b[2J", "\x1b]0;t\x07", "\x1b[H", "a\rb"))
