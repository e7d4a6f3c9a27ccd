"""`perdure keys` lists API keys, and revokes them while a server reads their file."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from perdure.server import create_app
from perdure.server.http.keys import KeysFileAccess, create_api_key_and_hash
from perdure.server.http.keys_file import read_keys, revoke_keys
from perdure.settings import Settings
from tests.cli.commands import invoke, run, run_and_read_error, run_json, split_rows
from tests.server.running import run_server, wait_until

HEAD = "# Keys of the support desk.\n# Ask boss for a new one.\n\n"
DORA, PHONE, BOSS = "perdure_dora", "perdure_phone", "perdure_boss"


def hash_key(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def build_key_block(key: str, user: str, comment: str = "", extra: str = "") -> str:
    heading = f"# {comment}\n" if comment else ""
    return f'{heading}[[keys]]\nuser = "{user}"  # whose\nsha256 = "{hash_key(key)}"\n{extra}'


BLOCKS = {
    DORA: build_key_block(DORA, "dora", "Dora's laptop"),
    BOSS: build_key_block(BOSS, "boss", "everything", 'permissions = ["perdure:admin"]\n'),
    PHONE: build_key_block(PHONE, "dora", "Dora's phone", 'tenant = "acme"\n'),
}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """Write a keys file with comments that other users may not read, and return its path."""
    path = tmp_path / "keys.toml"
    path.write_text(HEAD + "\n".join(BLOCKS.values()))
    path.chmod(0o640)
    return path


def test_keys_list_prints_user_permissions_and_hash_prefix(keys_file: Path) -> None:
    """`--user` and `--tenant` narrow the list."""
    assert split_rows(run("keys", "list", "--keys", str(keys_file)))[1:] == [
        ["dora", hash_key(DORA)[:12]],
        ["boss", "perdure:admin", hash_key(BOSS)[:12]],
        ["dora", "acme", hash_key(PHONE)[:12]],
    ]
    assert run_json("keys", "list", "--keys", str(keys_file), "--user", "boss") == [
        {
            "user": "boss",
            "sha256": hash_key(BOSS),
            "tenant": None,
            "permissions": ["perdure:admin"],
            "teams": [],
        }
    ]
    assert len(run_json("keys", "list", "--keys", str(keys_file), "--tenant", "acme")) == 1
    assert invoke("keys", "list", "--keys", str(keys_file), "--user", "emil").exit_code == 1


def test_keys_list_prints_teams(keys_file: Path) -> None:
    with keys_file.open("a") as lines:
        lines.write(build_key_block("key", "emil", extra='teams = ["support", "night shift"]\n'))
    output = run("keys", "list", "--keys", str(keys_file), "--user", "emil")

    assert output.splitlines()[0].split() == ["user", "tenant", "permissions", "teams", "hash"]
    assert split_rows(output)[1:] == [["emil", "support, night shift", hash_key("key")[:12]]]


def test_revoke_by_user_removes_only_blocks_of_user(keys_file: Path) -> None:
    """All keys of the user are removed with their comments; other lines are unchanged."""
    revoked = run_json("keys", "revoke", "--keys", str(keys_file), "--user", "dora", "--yes")

    assert [key["sha256"] for key in revoked] == [hash_key(DORA), hash_key(PHONE)]
    assert keys_file.read_text() == HEAD + BLOCKS[BOSS] + "\n"
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o640
    assert [path.name for path in keys_file.parent.glob("*keys*")] == ["keys.toml"]


def test_revoke_by_tenant_or_hash_prefix_removes_one_key(keys_file: Path) -> None:
    """A tenant narrows the keys of a user, and a prefix of a hash is enough."""
    run("keys", "revoke", "--keys", str(keys_file), "--user", "dora", "--tenant", "acme", "--yes")
    assert keys_file.read_text() == HEAD + BLOCKS[DORA] + "\n" + BLOCKS[BOSS] + "\n"
    output = run(
        "keys", "revoke", "--keys", str(keys_file), "--hash", hash_key(DORA)[:5], stdin="y\n"
    )
    assert output == f"revoked 1 key of 'dora' ({hash_key(DORA)[:12]})\n"
    assert keys_file.read_text() == HEAD + BLOCKS[BOSS] + "\n"


def test_revoke_asks_for_confirmation(keys_file: Path) -> None:
    """Without --yes nothing is revoked until it is confirmed."""
    before = keys_file.read_bytes()
    result = invoke("keys", "revoke", "--keys", str(keys_file), "--user", "dora", stdin="n\n")

    assert result.exit_code == 1
    assert "Revoke 2 keys of 'dora' (" in result.stderr
    assert keys_file.read_bytes() == before


def test_invalid_revoke_is_refused_and_keeps_file(
    keys_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown and empty users and hashes are refused, and so are both together and neither."""
    before = keys_file.read_bytes()
    for arguments in (
        ("--user", "emil"),
        ("--hash", "0" * 10),
        ("--user", "dora", "--tenant", "x"),
    ):
        result = invoke("keys", "revoke", "--keys", str(keys_file), *arguments, "--yes")
        assert (result.exit_code, result.stdout) == (1, ""), arguments
        assert "has no key" in result.stderr
    refused: list[tuple[tuple[str, ...], str]] = [
        (("--user", ""), "--user is ''; expected a user name"),
        (("--hash", ""), "--hash is empty"),
        ((), "pass either --user or --hash"),
        (("--user", "dora", "--hash", "ab"), "pass either --user or --hash"),
    ]
    for options, expected_message in refused:
        assert expected_message in run_and_read_error(
            "keys", "revoke", "--keys", str(keys_file), *options, "--yes", capsys=capsys
        )
    wrong = run_and_read_error("keys", "list", "--keys", "none.toml", capsys=capsys)
    assert "the keys file 'none.toml' cannot be read" in wrong
    assert keys_file.read_bytes() == before


def test_revoke_by_ambiguous_hash_prefix_is_refused(
    keys_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the keys with this prefix."""
    first = hash_key(DORA)[0]
    other = next(key for key in map(str, range(1000)) if hash_key(key)[0] == first)
    with keys_file.open("a") as lines:
        lines.write(build_key_block(other, "emil"))
    message = run_and_read_error(
        "keys", "revoke", "--keys", str(keys_file), "--hash", first, "--yes", capsys=capsys
    )

    assert (
        f"the hash prefix {first!r} is ambiguous: it matches dora {hash_key(DORA)[:12]}" in message
    )
    assert len(read_keys(keys_file)) == 4


def test_keys_file_without_keys_is_valid(keys_file: Path) -> None:
    """After all keys were revoked, the file can be read and has no users."""
    for user in ("dora", "boss"):
        run("keys", "revoke", "--keys", str(keys_file), "--user", user, "--yes")

    assert keys_file.read_text().startswith(HEAD)
    assert KeysFileAccess(keys_file).tenants == set()


def test_revoke_refuses_keys_file_that_it_cannot_edit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys in an inline array, or with text that looks like a table, must be removed by hand."""
    inline = f'keys = [{{user = "dora", sha256 = "{hash_key(DORA)}"}}]\n'
    odd = f'[[keys]]\nuser = """\n[[keys]]\n"""\nsha256 = "{hash_key(DORA)}"\n'
    for text, user in ((inline, "dora"), (odd, "[[keys]]\n")):
        keys_file = tmp_path / "keys.toml"
        keys_file.write_text(text)
        message = run_and_read_error(
            "keys", "revoke", "--keys", str(keys_file), "--user", user, "--yes", capsys=capsys
        )
        assert "remove the API keys from the file by hand" in message
        assert keys_file.read_text() == text


def test_revoke_keeps_line_ends_and_symbolic_link(keys_file: Path, tmp_path: Path) -> None:
    """A Windows file keeps its line ends, and a symbolic link still points to the file."""
    keys_file.write_bytes(keys_file.read_bytes().replace(b"\n", b"\r\n"))
    (tmp_path / "link.toml").symlink_to(keys_file)
    run("keys", "revoke", "--keys", str(tmp_path / "link.toml"), "--user", "dora", "--yes")

    assert (tmp_path / "link.toml").is_symlink()
    assert keys_file.read_bytes() == (HEAD + BLOCKS[BOSS] + "\n").replace("\n", "\r\n").encode()


def test_concurrent_revocations_are_all_applied(tmp_path: Path) -> None:
    """A reader finds a complete file at any moment."""
    path, users = tmp_path / "keys.toml", [f"user{n}" for n in range(12)]
    path.write_text("".join(build_key_block(f"perdure_{user}", user) for user in users))
    ended, read_errors = threading.Event(), list[Exception]()

    def read_repeatedly() -> None:
        while not ended.is_set():
            try:
                read_keys(path)
            except Exception as exc:
                read_errors.append(exc)

    reader = threading.Thread(target=read_repeatedly)
    reader.start()
    code = (
        "import sys; from pathlib import Path; "
        "from perdure.server.http.keys_file import revoke_keys; "
        "[revoke_keys(Path(sys.argv[1]), lambda key: key.user == user) for user in sys.argv[2:]]"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(path), *users[n::3]]) for n in range(3)
    ]
    codes = [process.wait(120) for process in processes]
    ended.set()
    reader.join()

    assert (codes, read_errors) == ([0, 0, 0], [])
    assert read_keys(path) == []


def test_revoke_keeps_concurrent_change_of_another_program(keys_file: Path) -> None:
    """A key that is added while another is revoked is not lost."""
    added, changes = build_key_block("perdure_emil", "emil"), iter([True])

    def is_revoked(key: object) -> bool:
        if next(changes, False):  # after the file was read
            with keys_file.open("a") as lines:
                lines.write(added)
        return getattr(key, "user", "") == "dora"

    assert len(revoke_keys(keys_file, is_revoked)) == 2
    assert [key.user for key in read_keys(keys_file)] == ["boss", "emil"]


def test_running_server_refuses_revoked_key(db: Path, tmp_path: Path) -> None:
    """The server refuses the key soon after the file is replaced; other keys stay valid."""
    keys_file = tmp_path / "keys.toml"
    (dora, _), (boss, _) = create_api_key_and_hash("dora"), create_api_key_and_hash("boss")
    keys_file.write_text(build_key_block(dora, "dora") + build_key_block(boss, "boss"))
    with run_server(create_app(Settings(db=str(db)), access=KeysFileAccess(keys_file))) as url:

        def get_status(key: str) -> int:
            return httpx.get(f"{url}/memories", headers={"x-api-key": key}).status_code

        assert (get_status(dora), get_status(boss)) == (200, 200)
        run("keys", "revoke", "--keys", str(keys_file), "--user", "dora", "--yes")
        wait_until(lambda: get_status(dora) == 401)
        assert get_status(boss) == 200
