"""A file with handlers of langgraph_sdk.Auth, as langgraph's guide shows it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.graph import START, MessagesState, StateGraph
from langgraph_sdk import Auth

from perdure.errors import ConfigurationError
from perdure.graphs.langgraph_json import LanggraphFile
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.access import Action, Filter, Forbidden, Identity, Refused
from perdure.server.http.auth_file import AuthFileAccess
from perdure.settings import Settings
from tests.server.probe import add_probe_routes
from tests.server.running import run_server

# of langgraph's guide to authentication, and of the docstrings of langgraph_sdk.Auth
GUIDE = """
from langgraph_sdk import Auth

auth = Auth()
USERS = {
    "ann-token": {"identity": "ann", "permissions": ["threads:write"], "role": "staff"},
    "bob-token": {"identity": "bob"},
    "root-token": {"identity": "root", "permissions": ["perdure:admin"]},
    "out-token": {"identity": "out", "is_authenticated": False},
}

@auth.authenticate
async def authenticate(authorization: str | None) -> Auth.types.MinimalUserDict:
    assert authorization is None or isinstance(authorization, str)
    scheme, _, token = (authorization or "").partition(" ")
    if scheme != "Bearer" or token not in USERS:
        raise Auth.exceptions.HTTPException(
            status_code=401, detail="Invalid token", headers={"WWW-Authenticate": "Bearer x"}
        )
    return USERS[token]

@auth.on
async def deny(ctx: Auth.types.AuthContext, value: dict):
    return False

@auth.on.threads
async def threads(ctx: Auth.types.AuthContext, value: dict):
    value.setdefault("metadata", {})["owner"] = ctx.user.identity
    return {"owner": ctx.user.identity}

@auth.on.threads.create_run
async def run(ctx, value):
    assert "threads:write" in ctx.permissions, "you may not write"
    assert ctx.user["role"] == ctx.user.role == "staff" and "role" in ctx.user
    assert (ctx.resource, ctx.action) == ("threads", "create_run")

@auth.on.threads.delete
async def delete(ctx, value):
    raise Auth.exceptions.HTTPException(status_code=409, detail="not now")

@auth.on.store
async def store(ctx: Auth.types.AuthContext, value: dict):
    namespace = tuple(value["namespace"]) if value.get("namespace") else ()
    if not namespace or namespace[0] != ctx.user.identity:
        namespace = (ctx.user.identity, *namespace)
    value["namespace"] = namespace

@auth.on.store.delete
async def own_only(ctx, value):
    assert value["namespace"][0] == ctx.user.identity, "Not authorized"

@auth.on.store(actions=["search"])
async def everything(ctx, value):
    return True
"""


def write_auth_file(tmp_path: Path, text: str, name: str = "auth.py") -> str:
    file = tmp_path / name
    file.write_text(text)
    return f"{file}:auth"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the guide's handlers."""
    folder = tmp_path_factory.mktemp("auth")
    access, settings = (
        AuthFileAccess(write_auth_file(folder, GUIDE)),
        Settings(db=str(folder / "memory.db")),
    )
    with run_server(add_probe_routes(create_app(settings, access=access))) as address:
        yield address


def post_probe(
    url: str, action: str, value: Any = None, token: str = "ann-token"
) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"}
    return httpx.post(f"{url}/probe/{action}", json=value or {}, headers=headers)


def test_authenticate_handler_identifies_user_or_answers_401(url: str) -> None:
    assert post_probe(url, "threads:read").json()["user"] == "ann"
    for token in ("wrong", "out-token"):
        assert post_probe(url, "threads:read", token=token).status_code == 401
    without = httpx.post(f"{url}/probe/threads:read", json={})
    assert (without.status_code, without.json()["detail"]) == (401, "Invalid token")
    assert without.headers["www-authenticate"] == "Bearer x"


@pytest.mark.parametrize(
    ("action", "value", "authorized_value"),
    [
        ("threads:create", {"thread_id": "t"}, {"thread_id": "t", "metadata": {"owner": "ann"}}),
        ("threads:search", {"metadata": None}, {"metadata": {"owner": "ann"}}),
        ("threads:create_run", {}, {}),
        ("store:put", {"namespace": ["n"]}, {"namespace": ["ann", "n"]}),
        ("store:list_namespaces", {"namespace": None}, {"namespace": ["ann"]}),
        ("store:delete", {"namespace": ["ann", "n"]}, {"namespace": ["ann", "n"]}),
        ("store:search", {"namespace": ["n"]}, {"namespace": ["n"]}),
    ],
)
def test_most_specific_handler_authorizes_and_changes_value(
    url: str, action: str, value: Any, authorized_value: Any
) -> None:
    reply = post_probe(url, action, value)

    assert reply.status_code == 200, reply.text
    assert reply.json()["value"] == authorized_value


@pytest.mark.parametrize(
    ("action", "value", "token", "status", "expected_detail"),
    [
        ("assistants:read", {}, "ann-token", 403, "is not allowed"),
        ("threads:create_run", {}, "bob-token", 403, "you may not write"),
        ("threads:delete", {}, "ann-token", 409, "not now"),
        ("store:delete", {"namespace": ["bob"]}, "ann-token", 403, "Not authorized"),
        ("store:search", {"namespace": ["perdure", "x"]}, "ann-token", 403, "internal data"),
        ("admin", {}, "ann-token", 403, "whole database"),
    ],
)
def test_denied_actions_answer_with_status_and_detail_of_handler(
    url: str, action: str, value: Any, token: str, status: int, expected_detail: str
) -> None:
    reply = post_probe(url, action, value, token)

    assert (reply.status_code, expected_detail in reply.json()["detail"]) == (status, True)


def test_admin_permission_allows_admin_action_only(url: str) -> None:
    assert post_probe(url, "admin", token="root-token").status_code == 200
    assert post_probe(url, "assistants:read", token="root-token").status_code == 403


# -- without a server


def authorize_action(
    access: AuthFileAccess, action: Action, value: Any = None, user: Any = None
) -> Filter:
    identity = Identity("ann", raw_user=user)
    return asyncio.run(
        access.authorize_and_build_filter(identity, action, {} if value is None else value)
    )


def build_access_with_handlers(tmp_path: Path, text: str) -> AuthFileAccess:
    begins = "from langgraph_sdk import Auth\nauth = Auth()\n@auth.authenticate\n"
    return AuthFileAccess(
        write_auth_file(tmp_path, f"{begins}async def user():\n    return 'ann'\n{text}")
    )


def test_action_without_matching_handler_is_denied(tmp_path: Path) -> None:
    """Langgraph's own server would allow the action."""
    access = build_access_with_handlers(
        tmp_path, "@auth.on.threads.read\nasync def read(ctx, value): ...\n"
    )

    assert authorize_action(access, "threads:read") == {}
    for action in ("threads:create", "store:get", "assistants:search"):
        with pytest.raises(Forbidden, match="no handler is registered for it"):
            authorize_action(access, action)


def test_handlers_are_chosen_from_most_to_least_specific(tmp_path: Path) -> None:
    def render_handler(decorator: str, name: str) -> str:
        return f"@{decorator}\nasync def {name}(ctx, value): value['by'] = {name!r}\n"

    access = build_access_with_handlers(
        tmp_path,
        render_handler("auth.on", "all")
        + render_handler("auth.on(actions='read')", "action")
        + render_handler("auth.on(resources=['threads'])", "resource")
        + render_handler("auth.on.threads.read", "both"),
    )

    def run_handler(action: Action) -> str:
        value: dict[str, str] = {}
        authorize_action(access, action, value)
        return value["by"]

    actions: tuple[Action, ...] = (
        "threads:read", "threads:create", "assistants:read", "store:get"
    )  # fmt: skip
    assert [run_handler(each) for each in actions] == ["both", "resource", "action", "all"]


@pytest.mark.parametrize(
    ("result", "denied"),
    [
        ({"owner": "ann"}, False),
        ({"owner": {"$eq": "ann"}, "in": {"$contains": "x"}}, False),
        ({"in": {"$contains": ["x", "y"]}}, False),
        ({}, False),
        ({"owner": {"$ne": "ann"}}, True),
        ({"owner": {"$eq": "a", "$contains": "b"}}, True),
        ({"owner": {}}, True),
        ({"owner": ["ann"]}, True),
        ({"owner": {"$eq": ["ann"]}}, True),
        ({"owner": {"$contains": {"x": 1}}}, True),
        ({"owner": None}, True),
        ("ann", True),
        (1, True),
        (0, True),
    ],
)
def test_handler_results_are_accepted_as_filters_or_denied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, result: Any, denied: bool
) -> None:
    access = build_access_with_handlers(
        tmp_path, f"@auth.on\nasync def all(ctx, value): return {result!r}\n"
    )
    if denied:
        with pytest.raises(Forbidden):
            authorize_action(access, "threads:search")
        assert "expected None, a bool or a filter" in caplog.text
    else:
        assert authorize_action(access, "threads:search") == result


def test_filter_for_store_action_is_denied(tmp_path: Path) -> None:
    access = build_access_with_handlers(
        tmp_path, "@auth.on\nasync def all(ctx, value): return {'owner': 'ann'}\n"
    )
    with pytest.raises(Forbidden, match="returned an invalid filter"):
        authorize_action(access, "store:search")
    assert authorize_action(access, "assistants:search") == {"owner": "ann"}


USERS = """
class User:
    def __init__(self, identity): self.identity = identity
    is_authenticated = True
    permissions = ["perdure:admin"]
    tenant = "acme"
"""


@pytest.mark.parametrize(
    ("returned", "identity"),
    [
        ("'ann'", Identity("ann")),
        ("{'identity': 'ann', 'tenant': 'acme'}", Identity("ann", "acme")),
        ("User('ann')", Identity("ann", "acme", frozenset({"perdure:admin"}))),
        ("Auth.types.StudioUser('ann', True)", Identity("ann", None, frozenset({"authenticated"}))),
    ],
)
def test_authenticate_handler_may_return_string_dict_or_object(
    tmp_path: Path, settings: Settings, returned: str, identity: Identity
) -> None:
    """The handler may be a function that is not async."""
    text = f"from langgraph_sdk import Auth\nauth = Auth()\n{USERS}\n@auth.authenticate\n"
    access = AuthFileAccess(
        write_auth_file(tmp_path, f"{text}def user():\n    return {returned}\n")
    )

    assert asyncio.run(access.identify(build_connection())) == identity


@pytest.mark.parametrize("returned", ["None", "''", "{}", "{'identity': 7}", "42"])
def test_authenticate_result_without_identity_answers_401(tmp_path: Path, returned: str) -> None:
    text = "from langgraph_sdk import Auth\nauth = Auth()\n@auth.authenticate\n"
    access = AuthFileAccess(
        write_auth_file(tmp_path, f"{text}async def user():\n    return {returned}\n")
    )
    with pytest.raises(Refused, match="a user without a valid identity") as raised:
        asyncio.run(access.identify(build_connection()))

    assert raised.value.status == 401


def build_connection() -> Any:
    from starlette.requests import Request

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    return Request(scope)


def test_authenticate_handler_receives_all_documented_parameters(
    tmp_path: Path, settings: Settings
) -> None:
    text = (
        "from langgraph_sdk import Auth\nauth = Auth()\nSEEN = {}\n@auth.authenticate\n"
        "async def user(request, body, path, method, path_params, query_params, headers, "
        "authorization, unknown=1):\n"
        "    SEEN.update({k: repr(v) for k, v in locals().items()}, kind=type(request).__name__)\n"
        "    return 'ann'\n"
        "@auth.on\nasync def all(ctx, value): value['seen'] = SEEN\n"
    )
    access = AuthFileAccess(write_auth_file(tmp_path, text))
    with run_server(add_probe_routes(create_app(settings, access=access))) as url:
        seen = httpx.post(
            f"{url}/probe/threads:read?q=1", json={"n": 1}, headers={"authorization": "Basic x"}
        ).json()["value"]["seen"]
        thread = httpx.get(f"{url}/probe/thread/t")

    assert seen["body"] == "{'n': 1}"
    assert seen["path"] == "'/probe/threads:read'"
    assert (seen["method"], seen["kind"]) == ("'POST'", "Request")
    assert (seen["path_params"], seen["query_params"]) == ("{}", "{'q': '1'}")
    assert "b'authorization': b'Basic x'" in seen["headers"]
    assert seen["authorization"] == "'Basic x'"
    assert thread.status_code == 404


@contextmanager
def _raises_configuration_error(pattern: str) -> Iterator[None]:
    with pytest.raises(ConfigurationError, match=pattern):
        yield


def test_unusable_auth_files_raise_configuration_errors(tmp_path: Path) -> None:
    auth = "from langgraph_sdk import Auth\nauth = Auth()\n"
    user = f"{auth}@auth.authenticate\ndef user({{}}): ...\n"
    cases: list[tuple[str, Callable[[], str]]] = [
        (r"expected .*file\.py:name", lambda: "auth.py"),
        ("does not exist", lambda: str(tmp_path / "none.py:auth")),
        ("ModuleNotFoundError", lambda: "no_such_module:auth"),
        ("SyntaxError", lambda: write_auth_file(tmp_path, "def")),
        ("ZeroDivisionError", lambda: write_auth_file(tmp_path, "1/0")),
        ("has no 'auth'", lambda: write_auth_file(tmp_path, "", "empty.py")),
        (
            "is of type int; expected an instance of langgraph_sdk.Auth",
            lambda: write_auth_file(tmp_path, "auth = 1", "number.py"),
        ),
        (
            "no authentication handler",
            lambda: write_auth_file(tmp_path, auth, "nobody.py"),
        ),
        (
            "has the parameter 'scopes'",
            lambda: write_auth_file(tmp_path, auth + user.format("scopes"), "scopes.py"),
        ),
    ]
    for pattern, path in cases:
        with _raises_configuration_error(pattern):
            AuthFileAccess(path())


def test_auth_file_imports_module_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside_the_auth_file.py").write_text("NAME = 'ann'\n")
    text = "from beside_the_auth_file import NAME\nfrom langgraph_sdk import Auth\nauth = Auth()\n"
    path = write_auth_file(tmp_path, f"{text}@auth.authenticate\ndef user(): return NAME\n")

    assert asyncio.run(AuthFileAccess(path).identify(build_connection())).user == "ann"


def test_langgraph_json_names_auth_file(tmp_path: Path) -> None:
    file = tmp_path / "langgraph.json"
    file.write_text(json.dumps({"graphs": {}, "auth": {"path": "./auth.py:auth"}}))
    write_auth_file(tmp_path, GUIDE)

    auth_path = LanggraphFile.read(file).auth
    assert auth_path is not None
    AuthFileAccess(auth_path)
    file.write_text('{"graphs": {}}')
    assert LanggraphFile.read(file).auth is None
    for text in ("[]", "{", '{"graphs": {}, "auth": {"n": 1}}', '{"graphs": {}, "auth": 3}'):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=r"langgraph\.json"):
            LanggraphFile.read(file)
    with pytest.raises(ConfigurationError, match="does not exist"):
        LanggraphFile.read(tmp_path / "none.json")


def test_auth_class_of_unsupported_sdk_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """perdure reads private attributes of the class; this test pins their names and forms."""
    auth = Auth()
    assert (auth._handlers, auth._global_handlers, auth._authenticate_handler) == ({}, [], None)
    monkeypatch.delattr(Auth, "_global_handlers")
    text = "from langgraph_sdk import Auth\nauth = object.__new__(Auth)\n"
    with pytest.raises(ConfigurationError, match=r"langgraph-sdk \d.* install another version"):
        AuthFileAccess(write_auth_file(tmp_path, text))


TEAM = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def user(headers): return headers[b"x-api-key"].decode().removeprefix("key-of-")

@auth.on.threads
async def threads(ctx, value):
    value.setdefault("metadata", {})["owner"] = ctx.user.identity
    return {"owner": ctx.user.identity}

@auth.on.store
async def store(ctx, value): return True
"""
"""Each thread belongs to its owner, and the whole team shares the store."""


def test_store_search_and_listing_omit_internal_namespaces(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.server.http.call._PAGE_SIZE", 2)
    app = create_app(settings, access=AuthFileAccess(write_auth_file(tmp_path, TEAM, "team.py")))
    namespaces = [[label, "x"] for label in ("a", "b", "perdure.notes", "q", "r")]

    def post_to_store(path: str, **asked: Any) -> Any:
        return bob.post(f"/store/{path}", json=asked).json()

    with run_server(app) as url, httpx.Client(base_url=url, headers={"x-api-key": "bob"}) as bob:
        for number in range(5):
            own = {"thread_id": f"t{number}", "metadata": {"topic": "SECRET of ann"}}
            assert bob.post("/threads", json=own, headers={"x-api-key": "ann"}).is_success
        for namespace in namespaces:
            bob.put("/store/items", json={"namespace": namespace, "key": "k", "value": {}})
        direct = {"namespace_prefix": ["perdure", "server", "threads"]}
        assert bob.post("/store/items/search", json=direct).status_code == 403
        assert "SECRET" not in bob.get("/ui/store/items.json").text
        assert '"perdure"' not in bob.get("/ui/store.json").text
        for prefix in (None, ["*"], []):
            assert post_to_store("namespaces", prefix=prefix)["namespaces"] == namespaces
        assert post_to_store("namespaces", max_depth=1, limit=2, offset=3)["namespaces"] == [
            ["q"],
            ["r"],
        ]
        pages = [post_to_store("items/search", limit=2, offset=n)["items"] for n in (0, 2, 4, 6)]

    assert [[item["namespace"] for item in page] for page in pages] == [
        namespaces[:2],
        namespaces[2:4],
        namespaces[4:],
        [],
    ]


BATCH = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def authenticate(headers):
    return headers[b"x-user"].decode()

@auth.on
async def allow(ctx, value):
    return True

@auth.on.threads.create
async def create(ctx, value):
    value.setdefault("metadata", {})["owner"] = ctx.user.identity

@auth.on.threads.create_run
async def run(ctx, value):
    if str(value["thread_id"]).startswith("shared"):
        return None
    return {"owner": ctx.user.identity}
"""


@pytest.mark.parametrize("thread_ids", [["of-ann", "shared"], ["shared", "of-ann"]])
def test_each_run_of_a_batch_has_the_filter_of_its_own_check(
    tmp_path: Path, thread_ids: list[str]
) -> None:
    """A run on a shared thread must not give another run of the batch access to Ann's thread."""
    (tmp_path / "auth.py").write_text(BATCH)
    graph = StateGraph(MessagesState).add_node("answer", lambda state: {})
    app = create_app(
        Settings(db=str(tmp_path / "x.db")),
        access=AuthFileAccess(f"{tmp_path}/auth.py:auth"),
        graphs=Graphs({"answer": graph.add_edge(START, "answer").compile()}),
    )
    ann, bob = {"x-user": "ann"}, {"x-user": "bob"}
    body: dict[str, Any] = {"assistant_id": "answer", "input": {"messages": []}}
    with run_server(app) as url, httpx.Client(base_url=url) as client:
        for thread_id in thread_ids:
            client.post("/threads", headers=ann, json={"thread_id": thread_id})
        runs = [{**body, "thread_id": name, "if_not_exists": "create"} for name in thread_ids]
        refused = client.post("/runs/batch", headers=bob, json=runs)
        of_shared = client.post("/runs/batch", headers=bob, json=[runs[thread_ids.index("shared")]])
        runs_of_ann = client.get("/threads/of-ann/runs", headers=ann).json()

    assert refused.status_code == 404
    assert "of-ann" in refused.text
    assert of_shared.status_code == 200
    assert runs_of_ann == []
