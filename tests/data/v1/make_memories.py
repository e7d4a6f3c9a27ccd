"""Makes memories.db, with the first version of long-term memory.

Its last commit is ed35392: check that out, run `make view` there, and then
`PYTHONPATH=build/view python make_memories.py memories.db`.
"""

# mypy: ignore-errors
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, StateGraph
from models import Person

from perdure.checkpointers import SQLiteCheckpointer
from perdure.memory import ChatState, Collection, Examples, Formation, Instructions, Profile
from perdure.memory.drivers import run
from perdure.memory.forming.waiting import noting
from perdure.memory.longterm.backing import Backing
from perdure.stores import SQLiteStore


def on(thread):
    return {"configurable": {"thread_id": thread, "user_id": "ann"}}


def say(saver, thread, *texts):
    def respond(state):
        return {"messages": [AIMessage("I see.", id=f"{state['messages'][-1].id}-answer")]}

    builder = StateGraph(ChatState).add_node("respond", respond).add_edge(START, "respond")
    graph = builder.compile(checkpointer=saver)
    for number, text in enumerate(texts):
        graph.invoke({"messages": [HumanMessage(text, id=f"{thread}-{number}")]}, on(thread))


def fill(saver, store):
    formation = Formation(saver, store)
    say(saver, "monday", "My canoe is called Nutshell", "I am afraid of dogs")
    print(formation.form("monday", on("monday")))
    facts = Collection(store)
    [dogs] = [m for m in facts.list(kind="turn", config=on("monday")) if "dogs" in m.text]
    print(facts.delete(dogs.key, config=on("monday")))
    facts.insert("Ann lives in Ghent", key="home", config=on("monday"))
    facts.supersede("home", "Ann lives in Bruges", config=on("monday"))
    facts.insert("Ann sings in a choir", key="choir", config=on("monday"))
    facts.delete("choir", config=on("monday"))
    print(facts.insert("Ann pays with 4111 1111 1111 1111", config=on("monday")))
    say(saver, "tuesday", "Eva comes to dinner in May")
    run(noting(Backing(store), ("memories", "ann"), "tuesday", {"user_id": "ann"}))
    for key, sections in (("profile", False), ("large", True)):
        profile = Profile(Person, store, key=key, sections=sections)
        profile.merge({"name": "Ann", "home": {"city": "Ghent"}}, on("monday"))
        profile.patch([{"op": "add", "path": "/likes/-", "value": "figs"}], on("monday"))
    Examples(store).add("The train was cancelled", "Offered the bus", why="in a hurry",
                        config=on("monday"))  # fmt: skip
    instructions = Instructions(store, ("instructions", "{user_id}"))
    instructions.set("Answer in one sentence.", on("monday"))
    instructions.set("Answer in two sentences.", on("monday"))


def main(path):
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path) as store:
        fill(saver, store)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("VACUUM")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
