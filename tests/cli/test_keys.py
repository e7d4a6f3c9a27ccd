"""`perdure keys`: API keys are listed, and revoked while a server reads their file."""

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
from perdure.server.keys import KeysFileAccess, create_api_key_and_hash
from perdure.server.keys_file import read_keys, revoke_keys
from perdure.settings import Settings
from tests.cli.commands import invoke, run, run_and_read_error, run_json, split_rows
from tests.server.running import running, until

HEAD = "# Keys of the support desk.\n# Ask boss for a new one.\n\n"
DORA, PHONE, BOSS = "perdure_dora", "perdure_phone", "perdure_boss"


def hash_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def block(key: str, user: str, comment: str = "", more: str = "") -> str:
    above = f"# {comment}\n" if comment else ""
    return f'{above}[[keys]]\nuser = "{user}"  # whose\nsha256 = "{hash_of(key)}"\n{more}'


BLOCKS = {
    DORA: block(DORA, "dora", "Dora's laptop"),
    BOSS: block(BOSS, "boss", "everything", 'permissions = ["perdure:admin"]\n'),
    PHONE: block(PHONE, "dora", "Dora's phone", 'tenant = "acme"\n'),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with comments, that others may not read."""
    path = tmp_path / "keys.toml"
    path.write_text(HEAD + "\n".join(BLOCKS.values()))
    path.chmod(0o640)
    return path


def test_keys_are_listed(file: Path) -> None:
    """Whose each is, with what it may do and the beginning of its hash."""
    assert split_rows(run("keys", "list", "--keys", str(file)))[1:] == [
        ["dora", hash_of(DORA)[:12]],
        ["boss", "perdure:admin", hash_of(BOSS)[:12]],
        ["dora", "acme", hash_of(PHONE)[:12]],
    ]
    assert run_json("keys", "list", "--keys", str(file), "--user", "boss") == [
        {
            "user": "boss",
            "sha256": hash_of(BOSS),
            "tenant": None,
            "permissions": ["perdure:admin"],
            "teams": [],
        }
    ]
    assert len(run_json("keys", "list", "--keys", str(file), "--tenant", "acme")) == 1
    assert invoke("keys", "list", "--keys", str(file), "--user", "emil").exit_code == 1


def test_keys_are_revoked_by_user(file: Path) -> None:
    """All of the user, with their comments; everything else stays as it was written."""
    done = run_json("keys", "revoke", "--keys", str(file), "--user", "dora", "--yes")

    assert [key["sha256"] for key in done] == [hash_of(DORA), hash_of(PHONE)]
    assert file.read_text() == HEAD + BLOCKS[BOSS] + "\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [path.name for path in file.parent.glob("*keys*")] == ["keys.toml"]


def test_keys_are_revoked_by_tenant_and_hash(file: Path) -> None:
    """A tenant narrows a user, and a hash is named by its beginning."""
    run("keys", "revoke", "--keys", str(file), "--user", "dora", "--tenant", "acme", "--yes")
    assert file.read_text() == HEAD + BLOCKS[DORA] + "\n" + BLOCKS[BOSS] + "\n"
    said = run("keys", "revoke", "--keys", str(file), "--hash", hash_of(DORA)[:5], stdin="y\n")
    assert said == f"revoked 1 key of 'dora' ({hash_of(DORA)[:12]})\n"
    assert file.read_text() == HEAD + BLOCKS[BOSS] + "\n"


def test_it_asks(file: Path) -> None:
    """Without --yes nothing is revoked until it is confirmed."""
    before = file.read_bytes()
    result = invoke("keys", "revoke", "--keys", str(file), "--user", "dora", stdin="n\n")

    assert result.exit_code == 1
    assert "Revoke 2 keys of 'dora' (" in result.stderr
    assert file.read_bytes() == before


def test_what_is_not_revoked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown user or hash, an ambiguous or empty one, and neither or both."""
    before = file.read_bytes()
    for given in (("--user", "emil"), ("--hash", "0" * 10), ("--user", "dora", "--tenant", "x")):
        result = invoke("keys", "revoke", "--keys", str(file), *given, "--yes")
        assert (result.exit_code, result.stdout) == (1, ""), given
        assert "has no key" in result.stderr
    refused: list[tuple[tuple[str, ...], str]] = [
        (("--user", ""), "--user is ''; expected the name of a user"),
        (("--hash", ""), "--hash is empty"),
        ((), "pass either --user or --hash"),
        (("--user", "dora", "--hash", "ab"), "pass either --user or --hash"),
    ]
    for options, said in refused:
        assert said in run_and_read_error(
            "keys", "revoke", "--keys", str(file), *options, "--yes", capsys=capsys
        )
    wrong = run_and_read_error("keys", "list", "--keys", "none.toml", capsys=capsys)
    assert "the keys file 'none.toml' cannot be read" in wrong
    assert file.read_bytes() == before


def test_an_ambiguous_hash_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the keys that begin so."""
    first = hash_of(DORA)[0]
    other = next(key for key in map(str, range(1000)) if hash_of(key)[0] == first)
    with file.open("a") as lines:
        lines.write(block(other, "emil"))
    said = run_and_read_error(
        "keys", "revoke", "--keys", str(file), "--hash", first, "--yes", capsys=capsys
    )

    assert f"several hashes begin with {first!r} (dora {hash_of(DORA)[:12]}" in said
    assert len(read_keys(file)) == 4


def test_the_last_key_leaves_a_file_that_is_read(file: Path) -> None:
    """A file without keys is one of nobody, not a broken one."""
    for user in ("dora", "boss"):
        run("keys", "revoke", "--keys", str(file), "--user", user, "--yes")

    assert file.read_text().startswith(HEAD)
    assert KeysFileAccess(file).tenants == set()


def test_a_form_that_cannot_be_edited_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys of an array, or with a text that looks like a table, are to be removed by hand."""
    inline = f'keys = [{{user = "dora", sha256 = "{hash_of(DORA)}"}}]\n'
    odd = f'[[keys]]\nuser = """\n[[keys]]\n"""\nsha256 = "{hash_of(DORA)}"\n'
    for text, user in ((inline, "dora"), (odd, "[[keys]]\n")):
        file = tmp_path / "keys.toml"
        file.write_text(text)
        said = run_and_read_error(
            "keys", "revoke", "--keys", str(file), "--user", user, "--yes", capsys=capsys
        )
        assert "cannot be edited; remove the keys by hand" in said
        assert file.read_text() == text


def test_line_ends_and_links_stay(file: Path, tmp_path: Path) -> None:
    """A file of Windows keeps its line ends, and a link goes on naming the file."""
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    (tmp_path / "link.toml").symlink_to(file)
    run("keys", "revoke", "--keys", str(tmp_path / "link.toml"), "--user", "dora", "--yes")

    assert (tmp_path / "link.toml").is_symlink()
    assert file.read_bytes() == (HEAD + BLOCKS[BOSS] + "\n").replace("\n", "\r\n").encode()


def test_no_revocation_is_lost(tmp_path: Path) -> None:
    """Of several at once each is carried out, and a reader finds a whole file at any moment."""
    path, users = tmp_path / "keys.toml", [f"user{n}" for n in range(12)]
    path.write_text("".join(block(f"perdure_{user}", user) for user in users))
    ended, broken = threading.Event(), list[Exception]()

    def look() -> None:
        while not ended.is_set():
            try:
                read_keys(path)
            except Exception as exc:
                broken.append(exc)

    reader = threading.Thread(target=look)
    reader.start()
    code = (
        "import sys; from pathlib import Path; from perdure.server.keys_file import revoke_keys; "
        "[revoke_keys(Path(sys.argv[1]), lambda key: key.user == user) for user in sys.argv[2:]]"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(path), *users[n::3]]) for n in range(3)
    ]
    codes = [process.wait(120) for process in processes]
    ended.set()
    reader.join()

    assert (codes, broken) == ([0, 0, 0], [])
    assert read_keys(path) == []


def test_a_change_of_another_program_stays(file: Path) -> None:
    """A key that is added while another is revoked is not lost."""
    added, changes = block("perdure_emil", "emil"), iter([True])

    def is_revoked(key: object) -> bool:
        if next(changes, False):  # after the file was read
            with file.open("a") as lines:
                lines.write(added)
        return getattr(key, "user", "") == "dora"

    assert len(revoke_keys(file, is_revoked)) == 2
    assert [key.user for key in read_keys(file)] == ["boss", "emil"]


def test_a_server_refuses_a_revoked_key(db: Path, tmp_path: Path) -> None:
    """Soon after the file is replaced; other keys go on."""
    file = tmp_path / "keys.toml"
    (dora, _), (boss, _) = create_api_key_and_hash("dora"), create_api_key_and_hash("boss")
    file.write_text(block(dora, "dora") + block(boss, "boss"))
    with running(create_app(Settings(db=str(db)), access=KeysFileAccess(file))) as url:

        def status(key: str) -> int:
            return httpx.get(f"{url}/memories", headers={"x-api-key": key}).status_code

        assert (status(dora), status(boss)) == (200, 200)
        run("keys", "revoke", "--keys", str(file), "--user", "dora", "--yes")
        until(lambda: status(dora) == 401)
        assert status(boss) == 200
