"""A request for each route, about what belongs to Ann.

A new route needs an entry only if it has a body, or a parameter that `NAMED` does not have.
"""

from __future__ import annotations

from typing import Any, Final

CANARY: Final = "canary-7f3a of Ann"
THREAD: Final = "thread-of-ann"
KEPT: Final = "kept-of-ann"
"""A thread that the server has made; the other one comes from elsewhere."""
KEY: Final = "key-of-ann"
FORK: Final = "fork-of-ann"
"""A copy that nobody has made yet."""
PLACE: Final = ["memories", "ann"]
ASSISTANT: Final = "3f0e2c9a-6a3e-4a51-9d44-0d3b8f6f6c11"

NAMED: Final[dict[str, Any]] = {
    "thread_id": THREAD,
    "id": THREAD,
    "thread": THREAD,
    "key": KEY,
    "ns": PLACE,
    "namespace": PLACE,
    "q": "canary",
    "assistant_id": ASSISTANT,
    "view": "1f1e71fc-53de-6a0e-8005-e771d5265d49",
    "position": 0,
    "version": 1,
    "user": "ann",
    # checkpoint_id, checkpoint, a, b, run_id: of the thread, see tests/server/http/test_access.py
}
"""Parameters of paths and queries, and fields of forms, by their names."""

RUN: Final = {"assistant_id": "chat", "input": {"messages": [{"role": "user", "content": "hi"}]}}
CRON: Final = RUN | {"schedule": "0 0 1 1 *", "metadata": {"note": CANARY}}

BODIES: Final[dict[str, Any]] = {
    "POST /assistants": {
        "assistant_id": ASSISTANT,
        "graph_id": "chat",
        "context": {"prompt": CANARY},
        "if_exists": "do_nothing",
    },
    "POST /assistants/search": {},
    "POST /assistants/count": {},
    "PATCH /assistants/{assistant_id}": {"name": "changed", "metadata": {"owner": "bob"}},
    "POST /assistants/{assistant_id}/versions": {},
    "POST /assistants/{assistant_id}/latest": {"version": 1},
    "POST /threads": {"thread_id": KEPT, "if_exists": "do_nothing"},
    "POST /threads/search": {},
    "POST /threads/count": {},
    "POST /threads/prune": {"thread_ids": [THREAD], "strategy": "delete"},
    "PATCH /threads/{thread_id}": {"metadata": {"owner": "bob", "n": 1}},
    "POST /threads/{thread_id}/state/checkpoint": {"checkpoint": {}},
    "POST /threads/{thread_id}/state": {"values": {"messages": []}},
    "POST /threads/{thread_id}/history": {},
    "POST /threads/{thread_id}/runs/stream": RUN | {"if_not_exists": "create"},
    "POST /threads/{thread_id}/runs/wait": RUN,
    "POST /threads/{thread_id}/runs": RUN,
    "POST /runs/stream": RUN,
    "POST /runs/wait": RUN,
    "POST /runs": RUN,
    "POST /runs/batch": [RUN, RUN | {"thread_id": THREAD}],
    "POST /runs/cancel": {"status": "all"},
    "POST /runs/crons": CRON,
    "POST /threads/{thread_id}/runs/crons": CRON,
    "PATCH /runs/crons/{cron_id}": {"enabled": False, "metadata": {"owner": "bob"}},
    "POST /runs/crons/search": {},
    "POST /runs/crons/count": {},
    "POST /threads/{thread_id}/commands": {"id": 1, "method": "run.start", "params": RUN},
    "POST /threads/{thread_id}/stream/events": {"channels": ["values"]},
    "PUT /store/items": {"namespace": PLACE, "key": KEY, "value": {"text": "changed"}},
    "DELETE /store/items": {"namespace": PLACE, "key": KEY},
    "POST /store/items/search": {"namespace_prefix": PLACE},
    "POST /store/namespaces": {"prefix": PLACE},
    "POST /memories/search": {"query": "canary"},
    "POST /memories": {"memory": "Bob has a dog."},
    "PATCH /memories/{key}": {"memory": "changed"},
}
"""Bodies in JSON, by method and path."""

FORMS: Final[dict[str, dict[str, Any]]] = {
    "POST /ui/answer": {"assistant": "chat", "of": "1f1e71fc53de6a0e8005e771d5265d49"},
    "POST /ui/compare": {"a": "1", "b": "2"},
    "POST /ui/fork": {"new": FORK},
    "POST /ui/prune": {"last": "1"},
    "POST /ui/say": {"assistant": "chat", "text": "hi"},
    "POST /ui/again": {"assistant": "chat"},
    "POST /ui/memory": {"text": "changed"},
    "POST /ui/forget-all": {"typed": "forget everything"},
    "POST /ui/person": {"typed": "ann"},
}
"""Fields of forms that have others than `NAMED`, by method and path."""

OWN: Final = {
    "POST /assistants/search",
    "POST /assistants/count",
    "POST /threads",
    "POST /threads/search",
    "POST /threads/count",
    "POST /threads/prune",
    "POST /runs/stream",
    "POST /runs/wait",
    "POST /runs",
    "POST /runs/cancel",
    "POST /runs/crons",
    "POST /runs/crons/search",
    "POST /runs/crons/count",
    "POST /threads/{thread_id}/commands",
    "POST /memories/search",
    "POST /memories",
    "GET /memories",
    "POST /ui/new",
    "GET /ui/runs",
    "GET /ui/runs.json",
    "GET /ui/threads",
    "GET /ui/threads.json",
    "GET /ui/waiting",
    "GET /ui/waiting.json",
}
"""What a stranger may ask for too: they get their own, or nothing."""
UNPROVEN: Final = {
    "POST /threads/{thread_id}/state": "it takes a graph that is served",
    "POST /threads/{thread_id}/runs/{run_id}/cancel": "it takes a run that has not ended",
    "GET /ui/seen": "it takes a recorded view",
    "GET /ui/seen.json": "it takes a recorded view",
    "POST /ui/quarantine/release": "it takes an entry in quarantine",
    "POST /ui/quarantine/discard": "it takes an entry in quarantine",
}
"""Examples that are of nothing, with the reason: a stranger might be refused for that alone."""
