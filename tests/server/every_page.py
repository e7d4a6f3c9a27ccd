"""A database with one text in every place that stores text, and the pages that show it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

from fastapi.routing import APIRoute, iter_route_contexts
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.types import Interrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.import_metadata import read_thread_head_or_raise
from perdure.effects import run_operation
from perdure.graphs.chat import chat_graph
from perdure.memory import Collection, Extraction, Quarantine, record_views, trim, views
from perdure.memory.thread_messages import read_watermark
from perdure.server import create_app
from perdure.settings import Settings
from perdure.stores import Provenance, SQLiteStore
from tests.contracts.puts import checkpoint_id_of, config_at, put

ID: Final = "6f1e71fc-53de-4a0e-8005-e771d5265d49"
ANN: Final[Any] = {"configurable": {"user_id": "ann"}}


def build_link(path: str, **values: Any) -> str:
    """Return the path with the values as its query."""
    return f"{path}?{urlencode(values, doseq=True, errors='surrogatepass')}"


def store_text_everywhere(saver: SQLiteCheckpointer, store: SQLiteStore, text: str) -> list[str]:
    """Store the text everywhere, and return the paths of all pages; each shows the text."""
    paths = [
        *_store_text_in_threads(saver, text),
        *_store_text_in_items(saver, store, text),
        "/ui/login",
    ]
    routes = iter_route_contexts(create_app(Settings(db=":memory:")).routes)
    pages = {
        str(route.path)
        for route in routes
        if isinstance(route.original_route, APIRoute) and "GET" in (route.methods or ())
    }
    covered_paths = {path.partition("?")[0] for path in paths}

    assert covered_paths == {
        path for path in pages if path.startswith("/ui/") and ".json" not in path
    }
    return [*paths, build_link("/ui/thread", id=f"no {text}")]


def _store_text_in_threads(saver: SQLiteCheckpointer, text: str) -> list[str]:
    call: Any = {"name": text, "args": {text: [text]}, "id": text}
    content: Any = [{"type": "reasoning", "reasoning": text}, {"type": "text", "text": text}]
    messages = [
        SystemMessage(text, id="s"),
        HumanMessage(text, id="h", name=text),
        AIMessage(content, tool_calls=[call], id="a", response_metadata={"model_name": text}),
        ToolMessage(f"{text} " * 20, tool_call_id=text, name=text, status="error", id="t"),
    ]
    metadata: Any = {"title": text, "user_id": text, text: text, "source": text, "step": 1}
    values: Any = {"messages": messages[:1], text: text, "mapping": {text: text}}
    root = put(saver, values, thread=text, metadata=metadata)
    values = {"messages": messages, text: [text], "mapping": {}, f"branch:to:{text}": None}
    head = put(saver, values, root, metadata=metadata)
    saver.put_writes(head, [(text, text)], text)
    for number in range(4):  # branches, which are drawn side by side
        put(saver, {"messages": [], f"{text} {number}": 1}, root, metadata=metadata)
    put(saver, values, thread=text, ns=text, metadata=metadata)
    put(saver, values, thread=ID, metadata=metadata)

    model = GenericFakeChatModel(messages=iter([AIMessage(text)]))
    graph = chat_graph(model, memory=[trim(max_tokens=5_000)], checkpointer=saver)
    config: Any = {**config_at("seen"), "callbacks": [record_views(saver)]}
    graph.invoke({"messages": [("user", text)]}, config)
    a, b = checkpoint_id_of(root), checkpoint_id_of(head)
    return [
        build_link("/ui/threads", q=text[:3], meta=f"{text}={text}"),
        "/ui/threads",
        "/ui/waiting",
        build_link("/ui/waiting", answered=text),
        build_link("/ui/thread", id=text),
        build_link("/ui/thread", id=text, ns=text),
        *store_questions(saver, text),
        build_link("/ui/seen", id="seen", view=views(saver, "seen", limit=1)[0].id),
        build_link("/ui/message", id=text, position=2),
        build_link("/ui/checkpoints", id=text),
        build_link("/ui/checkpoints", id=text, ns=text),
        build_link("/ui/checkpoint", id=text, checkpoint=b),
        build_link("/ui/checkpoint", id=text, checkpoint=b, channel=text),
        build_link("/ui/compare", id=text, a=a, b=b),
        build_link("/ui/prune", id=text, last=1),
        build_link("/ui/runs", id=text, status="error"),
        build_link("/ui/delete", id=text),
    ]


def store_questions(saver: SQLiteCheckpointer, text: str) -> list[str]:
    """Create threads with a question of each form, and return the paths of their pages."""
    paths = []
    for number, question in enumerate((text, {text: [text]}, _build_review_request(text))):
        config = put(saver, {"messages": [text]}, thread=f"asks {number}", metadata={"title": text})
        interrupt = Interrupt(question, id=f"{number:032}")
        saver.put_writes(config, [("__interrupt__", (interrupt,))], text, f"~__pregel_pull, {text}")
        paths.append(build_link("/ui/thread", id=f"asks {number}"))
    return paths


def _build_review_request(text: str) -> Any:
    """Build the question that `HumanInTheLoopMiddleware` asks about two tool calls."""
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


def _store_text_in_items(saver: SQLiteCheckpointer, store: SQLiteStore, text: str) -> list[str]:
    ann = Collection(store, ("memories", "{user_id}"))
    provenance = Provenance(
        thread_id=text, checkpoint_id=text, message_ids=(text,), actor=text, trust=text
    )
    for user in ("ann", text):
        of_user: Any = {"configurable": {"user_id": user}}
        ann.insert(text, key=text, provenance=provenance, config=of_user)
        ann.update(text, f"{text} 1 {text}", provenance=provenance, config=of_user)
    ann.insert(
        f"password is hunter2hunter2 {text}", key="secret", provenance=provenance, config=ANN
    )
    notes = ("notes", text, text)
    store.put(notes, text, {text: {text: [text]}}, provenance=provenance)
    store.put(notes, text, {text: {text: [text, text]}})

    extraction = Extraction(saver, store)
    adapter, name = extraction.get_adapter(), extraction.extractor.name
    seen = run_operation(read_watermark(adapter, ("memories", text), ID, name))
    head = read_thread_head_or_raise(saver, ID).checkpoint_id or ""
    failed = seen.with_failure(text, datetime.now(UTC), head, final=True)
    run_operation(adapter.write([failed.build_put(("memories", text), ID)]))
    [entry] = Quarantine(store).list(ANN)
    memory, item = {"ns": ("memories", "ann"), "key": text}, {"ns": notes, "key": text}
    return [
        "/ui/memories",
        build_link("/ui/memories", ns=("memories", text), kind=text),
        build_link("/ui/memories", q=text, why=text),
        build_link("/ui/memory", **memory),
        build_link("/ui/memory", **item),
        build_link("/ui/forget", **memory),
        build_link("/ui/forget", **item),
        build_link("/ui/forget-all", ns=("memories", text)),
        build_link("/ui/quarantine", key=entry.key),
        build_link("/ui/person", user=text),
        "/ui/store",
        build_link("/ui/store", ns=("notes", text)),
        build_link("/ui/store/items", ns="notes"),
        build_link("/ui/store/items", ns=("notes", text), q=text, filter="{}"),
        "/ui/storage",
        "/ui/storage/retention",
        build_link("/ui/jobs", queued=text),
    ]
