"""A database that has one text in all places, and every page that shows it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

from fastapi.routing import APIRoute, iter_route_contexts
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.types import Interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.titles import read_existing_head
from perdure.effects import run
from perdure.graphs.chat import chat_graph
from perdure.memory import Collection, Extraction, Quarantine, record_views, trim, views
from perdure.memory.thread_messages import read_watermark
from perdure.server import create_app
from perdure.settings import Settings
from perdure.stores import Provenance, SQLiteStore
from tests.contracts.puts import checkpoint_id_of, config_at, put

ID: Final = "6f1e71fc-53de-4a0e-8005-e771d5265d49"
ANN: Final[Any] = {"configurable": {"user_id": "ann"}}


def link(path: str, **values: Any) -> str:
    """A path with a query."""
    return f"{path}?{urlencode(values, doseq=True, errors='surrogatepass')}"


def every_page(saver: SQLiteCheckpointer, store: SQLiteStore, text: str) -> list[str]:
    """Put a text in all places; returns the paths of all pages, which show it."""
    paths = [*_of_threads(saver, text), *_of_items(saver, store, text), "/ui/login"]
    routes = iter_route_contexts(create_app(Settings(db=":memory:")).routes)
    pages = {
        str(route.path)
        for route in routes
        if isinstance(route.original_route, APIRoute) and "GET" in (route.methods or ())
    }
    shown = {path.partition("?")[0] for path in paths}

    assert shown == {path for path in pages if path.startswith("/ui/") and ".json" not in path}
    return [*paths, link("/ui/thread", id=f"no {text}")]


def _of_threads(saver: SQLiteCheckpointer, text: str) -> list[str]:
    call: Any = {"name": text, "args": {text: [text]}, "id": text}
    content: Any = [{"type": "reasoning", "reasoning": text}, {"type": "text", "text": text}]
    messages = [
        SystemMessage(text, id="s"),
        HumanMessage(text, id="h", name=text),
        AIMessage(content, tool_calls=[call], id="a", response_metadata={"model_name": text}),
        ToolMessage(f"{text} " * 20, tool_call_id=text, name=text, status="error", id="t"),
    ]
    about: Any = {"title": text, "user_id": text, text: text, "source": text, "step": 1}
    values: Any = {"messages": messages[:1], text: text, "mapping": {text: text}}
    root = put(saver, values, thread=text, metadata=about)
    values = {"messages": messages, text: [text], "mapping": {}, f"branch:to:{text}": None}
    head = put(saver, values, root, metadata=about)
    saver.put_writes(head, [(text, text)], text)
    for number in range(4):  # branches, which are drawn side by side
        put(saver, {"messages": [], f"{text} {number}": 1}, root, metadata=about)
    put(saver, values, thread=text, ns=text, metadata=about)
    put(saver, values, thread=ID, metadata=about)

    model = GenericFakeChatModel(messages=iter([AIMessage(text)]))
    graph = chat_graph(model, memory=[trim(max_tokens=5_000)], checkpointer=saver)
    config: Any = {**config_at("seen"), "callbacks": [record_views(saver)]}
    graph.invoke({"messages": [("user", text)]}, config)
    a, b = checkpoint_id_of(root), checkpoint_id_of(head)
    return [
        link("/ui/threads", q=text[:3], meta=f"{text}={text}"),
        "/ui/threads",
        link("/ui/thread", id=text),
        link("/ui/thread", id=text, ns=text),
        *questions(saver, text),
        link("/ui/seen", id="seen", view=views(saver, "seen", limit=1)[0].id),
        link("/ui/message", id=text, position=2),
        link("/ui/checkpoints", id=text),
        link("/ui/checkpoints", id=text, ns=text),
        link("/ui/checkpoint", id=text, checkpoint=b),
        link("/ui/checkpoint", id=text, checkpoint=b, channel=text),
        link("/ui/compare", id=text, a=a, b=b),
        link("/ui/prune", id=text, last=1),
        link("/ui/runs", id=text, status="error"),
        link("/ui/delete", id=text),
    ]


def questions(saver: SQLiteCheckpointer, text: str) -> list[str]:
    """Threads with a question of each form; returns the paths of their pages."""
    paths = []
    for number, question in enumerate((text, {text: [text]}, _review(text))):
        asked = put(saver, {"messages": [text]}, thread=f"asks {number}", metadata={"title": text})
        about = Interrupt(question, id=f"{number:032}")
        saver.put_writes(asked, [("__interrupt__", (about,))], text, f"~__pregel_pull, {text}")
        paths.append(link("/ui/thread", id=f"asks {number}"))
    return paths


def _review(text: str) -> Any:
    """What `HumanInTheLoopMiddleware` asks about two calls."""
    names = [text, f"{text} 2"]
    decisions = ["approve", "edit", "reject", "respond"]
    return {
        "action_requests": [
            {"name": name, "args": {text: text}, "description": text} for name in names
        ],
        "review_configs": [
            {"action_name": names[0], "allowed_decisions": decisions},
            {"action_name": names[1], "allowed_decisions": ["approve"]},
        ],
    }


def _of_items(saver: SQLiteCheckpointer, store: SQLiteStore, text: str) -> list[str]:
    ann = Collection(store, ("memories", "{user_id}"))
    said = Provenance(
        thread_id=text, checkpoint_id=text, message_ids=(text,), actor=text, trust=text
    )
    for user in ("ann", text):
        of_user: Any = {"configurable": {"user_id": user}}
        ann.insert(text, key=text, provenance=said, config=of_user)
        ann.update(text, f"{text} 1 {text}", provenance=said, config=of_user)
    ann.insert(f"password is hunter2hunter2 {text}", key="secret", provenance=said, config=ANN)
    notes = ("notes", text, text)
    store.put(notes, text, {text: {text: [text]}}, provenance=said)
    store.put(notes, text, {text: {text: [text, text]}})

    extraction = Extraction(saver, store)
    adapter, name = extraction.get_adapter(), extraction.extractor.name
    seen = run(read_watermark(adapter, ("memories", text), ID, name))
    head = read_existing_head(saver, ID).checkpoint_id or ""
    failed = seen.with_failure(text, datetime.now(UTC), head, final=True)
    run(adapter.write([failed.build_put(("memories", text), ID)]))
    [entry] = Quarantine(store).list(ANN)
    memory, item = {"ns": ("memories", "ann"), "key": text}, {"ns": notes, "key": text}
    return [
        "/ui/memories",
        link("/ui/memories", ns=("memories", text), kind=text),
        link("/ui/memories", q=text, why=text),
        link("/ui/memory", **memory),
        link("/ui/memory", **item),
        link("/ui/forget", **memory),
        link("/ui/forget", **item),
        link("/ui/forget-all", ns=("memories", text)),
        link("/ui/quarantine", key=entry.key),
        link("/ui/person", user=text),
        "/ui/store",
        link("/ui/store", ns=("notes", text)),
        link("/ui/store/items", ns="notes"),
        link("/ui/store/items", ns=("notes", text), q=text, filter="{}"),
        "/ui/storage",
        "/ui/storage/retention",
        link("/ui/jobs", queued=text),
    ]
