"""What the pages show is what happens: their Python runs, their commands print what they say."""

from __future__ import annotations

import asyncio
import code
import doctest
import importlib
import inspect
import io
import itertools
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from perdure.errors import PerdureError
from perdure.server import create_app
from perdure.settings import Settings
from tests import postgres_server
from tests.cli.commands import invoke, run_json
from tests.layout import PACKAGES, ROOT, folder_of, modules
from tests.server.running import running

REFERENCE = "reference.md"  # `make docs` writes it; it is in no commit
WRITTEN = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path.name != REFERENCE]
PAGES = [ROOT / "README.md", *WRITTEN]
TEXT_PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
FOLDERS = ("memory", "graphs", "checkpointers", "stores", "src", "tests", "benchmarks", "docs")
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
QUICK = 2  # each takes five seconds of a processor, most of it imports: the others are slow
PNG = "image/png"


def check_session(example: Example) -> str | None:
    """Type each `$ perdure …` of a block; `...` in what it shall print stands for anything."""
    for part in re.split(r"^\$ perdure ", example.parsed, flags=re.M)[1:]:
        command, expected = part.split("\n", 1)
        words = shlex.split(command)
        if words[0] == "rewind":  # the ids of checkpoints are others each time
            words[-1] = run_json("show", words[1])[-1]["checkpoint_id"][:18]
        got = shown(*words)
        if not doctest.OutputChecker().check_output(
            expected, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        ):
            return f"$ perdure {command}\nexpected:\n{expected}\ngot:\n{got}"
    return None


def shown(*words: str) -> str:
    """What a command prints, stderr included."""
    result = invoke(*words)
    if isinstance(result.exception, PerdureError):
        return f"{result.output}perdure: {result.exception}\n"
    assert result.exit_code in (0, 1), result.output  # 1: the answer is no
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.output


@pytest.fixture
def scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """A folder to run pages in, with the files and the server that they speak of."""
    if "postgres" in request.node.name:
        monkeypatch.setenv("DATABASE_URL", postgres_server.dsn())
        for name in ("OWNER_URL", "APPLICATION_URL"):  # one role: the page's GRANTs are not run
            monkeypatch.setenv(name, postgres_server.dsn_of("an_owner"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_DB", str(tmp_path / "memory.db"))
    export = ROOT / "tests" / "data" / "conversations.json"
    shutil.copy(export, tmp_path)
    with zipfile.ZipFile("export.zip", "w") as archive:
        archive.write(export, export.name)
    (tmp_path / "keys.toml").write_text(
        f'[[keys]]\nuser = "dora"\nsha256 = "4f2a{"0" * 60}"\n'
        f'[[keys]]\nuser = "boss"\nsha256 = "81c3{"0" * 60}"\npermissions = ["perdure:admin"]\n'
    )
    if "server" not in request.node.name:
        yield tmp_path
        return
    with running(create_app(Settings(db=str(tmp_path / "memory.db")))) as url:
        monkeypatch.setenv("PERDURE_URL", url)
        yield tmp_path


@pytest.mark.parametrize("page", [*PAGES, *TEXT_PAGES], ids=str)
def test_pages_are_finished(page: Path) -> None:
    """No placeholder is left, and every relative link leads to a file and a heading of it."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text)

    assert "@@" not in text
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    assert [link for link, _ in links if Path(link).name == REFERENCE] == []
    assert [link for link in links if link[1] and link[1] not in anchors(page, link[0])] == []


def anchors(page: Path, link: str) -> list[str]:
    """The anchors of the headings of a linked page, as GitHub makes them."""
    text = (page.parent / link if link else page).read_text(encoding="utf-8")
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


NAMED = re.compile(r"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.(?:py|sql)\b")
"""A file of Python or SQL; with folders, from the repository's root or from the package's."""
DOTTED = re.compile(
    r"\bperdure\.(?:checkpointers|stores|memory|graphs|server|cli|storage)\b(?:\.[a-z_]\w*)*"
)
EXAMPLES = {"auth.py", "langgraph_sdk/auth/__init__.py"}  # files of users, and of others
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if path.is_file()]
TEXTS = [path for path in FILES if path.suffix in (".py", ".sql") and "tests" not in path.parts]


@pytest.mark.parametrize("page", [*PAGES, *TEXT_PAGES], ids=str)
def test_pages_name_files_that_exist(page: Path) -> None:
    """Each module, statement file or test that a page names is there, also in decisions."""
    assert missing(page.read_text("utf-8")) == []


def test_the_map_names_modules_where_they_are() -> None:
    """A module stands in CONTRIBUTING.md in the row of its folder."""
    folder, lost = "", []
    for line in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines():
        if line.startswith("| ") and len(cells := line.strip("| ").split(" | ")) >= 2:
            folder = cells[0].strip("`") if line.startswith("| `") else folder
            named = NAMED.findall(cells[0] if line.startswith("| | ") else cells[1])
            lost += [
                name
                for name in named
                if not any((at / name).exists() for at in (ROOT, ROOT / folder))
            ]

    assert lost == []


def test_what_to_change_names_what_is_there() -> None:
    """CONTRIBUTING.md names functions and constants after the module that has them."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", text)
    pairs = [(path, name) for path, names in named for name in re.findall(r"`(\w+)`", names)]
    sources = {path: (ROOT / path).read_text("utf-8") for path, _ in pairs}

    assert len(pairs) > 10
    assert [pair for pair in pairs if not re.search(rf"\b{pair[1]}\b", sources[pair[0]])] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_comments_name_files_that_exist(path: Path) -> None:
    """So is each that a docstring or a comment names."""
    text = path.read_text("utf-8")
    said = re.findall(r"--.*", text) if path.suffix == ".sql" else [*comments(text)]

    assert missing("\n".join(said)) == []


def missing(text: str) -> list[str]:
    """The files and modules that a text names and that are not there."""
    there = {path.name for path in FILES} | {str(path.relative_to(ROOT)) for path in FILES}
    files = {name for name in NAMED.findall(text) if name not in EXAMPLES}
    lost = {name for name in files if not there & {name, f"src/perdure/{name}"}}
    dotted = {name for name in DOTTED.findall(text) if not is_name(name)}
    return sorted(lost | dotted)


def is_name(dotted: str) -> bool:
    """Whether it is a module, or what a module has."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def comments(source: str) -> Iterator[str]:
    """The docstrings and comments of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))
        if is_docstring or token.type == tokenize.COMMENT:
            yield token.string


def test_the_map_has_each_module() -> None:
    """CONTRIBUTING.md names each module of the library."""
    named = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    files = {folder_of(name).name for name in {*modules()} - {*PACKAGES}}

    assert sorted(file for file in files if not re.search(rf"\b{file}\.py\b", named)) == []


def test_the_reference_has_each_public_name() -> None:
    """The page that `make docs` writes has a heading for each public class and function."""
    page = runpy.run_path(str(ROOT / "docs" / "reference.py"))["reference"]()
    packages = ("checkpointers", "stores", "memory", "graphs")
    parts = [importlib.import_module(f"perdure.{package}") for package in packages]
    values = {name: getattr(part, name) for part in parts for name in part.__all__}
    public = {name for name, value in values.items() if inspect.isroutine(value)}
    public |= {name for name, value in values.items() if inspect.isclass(value)}
    sync = {name for name in public if not (name[0] == "a" and name[1:] in public)}

    assert sorted(name for name in sync if f"### `{name}`\n" not in page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_on_pages(page: Path, scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every Python block of a page runs, in order, and prints the text block right below it."""
    for example, shown in with_output(page):
        example.evaluate()
        printed = capsys.readouterr().out

        assert shown in (None, printed)
        assert shown != ""


def test_store_examples_can_be_pasted(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's blocks with a store work line by line, as a Python session reads them."""
    session = code.InteractiveConsole()
    blocks = [b for b in with_output(PAGES[0]) if "SQLiteStore" in str(b[0].parsed)]
    assert len(blocks) == 3
    for example, shown in blocks:
        for line in [*str(example.parsed).splitlines(), ""]:
            session.push(line)

        assert (shown, "") == capsys.readouterr()


def with_output(page: Path) -> Iterator[tuple[Example, str | None]]:
    """The Python blocks of a page, each with the text block right below it, if there is one."""
    parsers: list[Any] = [PythonCodeBlockParser(), CodeBlockParser("text", lambda example: None)]
    document = Sybil(parsers).parse(page)
    examples = list(document.examples())
    for example, below in itertools.zip_longest(examples, examples[1:]):
        if document.text[example.start :].startswith("```python"):
            beside = below is not None and not document.text[example.end : below.start].strip()
            is_text = beside and document.text[below.start :].startswith("```text")
            yield example, str(below.parsed) if is_text else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_on_pages(page: Path, scratch: Path) -> None:
    """The console sessions of a page, one after the other, print what it says."""
    for example in Sybil([CodeBlockParser("console", check_session)]).parse(page).examples():
        example.evaluate()


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name: str) -> None:
    """What a docstring shows is what happens."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.fixture(scope="module")
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Path, Any]:
    """Each notebook under test as it is after a run, or the error; two at a time."""
    slots = asyncio.Semaphore(2)
    cases = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    notebooks = [params["notebook"] for params in cases if "notebook" in params]

    async def run(notebook: Path) -> Any:
        made = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
        client = nbclient.NotebookClient(made, timeout=120, kernel_name="python3")
        path = [str(notebook.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        found_there = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}  # as Jupyter has it
        async with slots:
            await client.async_execute(cwd=str(tmp_path_factory.mktemp("cwd")), env=found_there)
        return made

    async def run_all() -> list[Any]:
        return await asyncio.gather(*map(run, notebooks), return_exceptions=True)

    return dict(zip(notebooks, asyncio.run(run_all()), strict=True))


@pytest.mark.parametrize(
    "notebook",
    [
        *NOTEBOOKS[:QUICK],
        *(pytest.param(notebook, marks=pytest.mark.slow) for notebook in NOTEBOOKS[QUICK:]),
    ],
    ids=lambda path: path.stem,
)
def test_notebooks(notebook: Path, ran: dict[Path, Any]) -> None:
    """A notebook runs from top to bottom, prints what it shows, and is small."""
    if isinstance(ran[notebook], BaseException):
        raise ran[notebook]
    shown = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]

    assert outputs(shown) == outputs(ran[notebook])
    assert notebook.stat().st_size < 80_000


def outputs(notebook: Any) -> list[tuple[str, list[dict[str, Any]]]]:
    """What each cell of a notebook prints, in however many pieces, and what else it shows.

    Without stderr, where matplotlib says that it looks for fonts; of a picture only that there is
    one, since fonts differ.
    """
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return [
        (
            "".join(o.text for o in printed if o.get("name") == "stdout"),
            [{k: k == PNG or v for k, v in o.data.items()} for o in printed if "data" in o],
        )
        for printed in cells
    ]
