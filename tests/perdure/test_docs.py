"""The documentation is correct: its Python runs, and its commands print the shown output."""

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
from tests.layout import PACKAGES, ROOT, list_modules, package_folder
from tests.server.running import run_server

REFERENCE = "reference.md"  # `make docs` writes it; it is in no commit
WRITTEN = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path.name != REFERENCE]
PAGES = [ROOT / "README.md", *WRITTEN]
TEXT_PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
FOLDERS = ("memory", "graphs", "checkpointers", "stores", "src", "tests", "benchmarks", "docs")
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
QUICK = 1  # each takes five seconds of a processor, most of it imports: the others are slow
PNG = "image/png"


def check_session(example: Example) -> str | None:
    """Run each `$ perdure …` of a block; `...` in the expected output stands for any text."""
    for part in re.split(r"^\$ perdure ", example.parsed, flags=re.M)[1:]:
        command, expected = part.split("\n", 1)
        words = shlex.split(command)
        if words[0] == "rewind":  # the ids of checkpoints are others each time
            words[-1] = run_json("show", words[1])[-1]["checkpoint_id"][:18]
        output = run_and_read_output(*words)
        if not doctest.OutputChecker().check_output(
            expected, output, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        ):
            return f"$ perdure {command}\nexpected:\n{expected}\ngot:\n{output}"
    return None


def run_and_read_output(*words: str) -> str:
    """Run a command and return its output, including stderr."""
    result = invoke(*words)
    if isinstance(result.exception, PerdureError):
        return f"{result.output}perdure: {result.exception}\n"
    assert result.exit_code in (0, 1), result.output  # 1: the answer is no
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.output


@pytest.fixture
def page_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """Return a folder for running pages, with the files and the server that the pages use."""
    if "postgres" in request.node.name:
        monkeypatch.setenv("DATABASE_URL", postgres_server.dsn())
        for name in ("OWNER_URL", "APPLICATION_URL"):  # one role: the page's GRANTs are not run
            monkeypatch.setenv(name, postgres_server.dsn_of_role("an_owner"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_DB", str(tmp_path / "memory.db"))
    export = ROOT / "tests" / "data" / "conversations.json"
    shutil.copy(export, tmp_path)
    with zipfile.ZipFile("export.zip", "w") as archive:
        archive.write(export, export.name)
    (tmp_path / "keys.toml").write_text(
        f'[[keys]]\nuser = "dora"\nsha256 = "4f2a{"0" * 60}"\nteams = ["support"]\n'
        f'[[keys]]\nuser = "boss"\nsha256 = "81c3{"0" * 60}"\npermissions = ["perdure:admin"]\n'
    )
    if "server" not in request.node.name:
        yield tmp_path
        return
    with run_server(create_app(Settings(db=str(tmp_path / "memory.db")))) as url:
        monkeypatch.setenv("PERDURE_URL", url)
        yield tmp_path


@pytest.mark.parametrize("page", [*PAGES, *TEXT_PAGES], ids=str)
def test_page_has_no_placeholder_and_no_broken_link(page: Path) -> None:
    """Every relative link leads to a file that exists, and to a heading of this file."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text)

    assert "@@" not in text
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    assert [link for link, _ in links if Path(link).name == REFERENCE] == []
    assert [link for link in links if link[1] and link[1] not in list_anchors(page, link[0])] == []


def list_anchors(page: Path, link: str) -> list[str]:
    """Return the anchors of the headings of a linked page, in GitHub's form."""
    text = (page.parent / link if link else page).read_text(encoding="utf-8")
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


FILE_NAME = re.compile(r"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.(?:py|sql)\b")
"""A name of a Python or SQL file; folders start at the repository's or the package's root."""
DOTTED_NAME = re.compile(
    r"\bperdure\.(?:checkpointers|stores|memory|graphs|server|cli|storage)\b(?:\.[a-z_]\w*)*"
)
EXAMPLES = {"auth.py", "langgraph_sdk/auth/__init__.py"}  # files of users, and of others
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if path.is_file()]
FILES.append(ROOT / "setup.py")
TEXTS = [path for path in FILES if path.suffix in (".py", ".sql") and "tests" not in path.parts]


@pytest.mark.parametrize("page", [*PAGES, *TEXT_PAGES], ids=str)
def test_page_names_only_files_that_exist(page: Path) -> None:
    """Each module, SQL file or test that a page names exists; decisions are pages too."""
    assert find_missing_names(page.read_text("utf-8")) == []


def test_contributing_map_names_modules_in_row_of_their_folder() -> None:
    """Each module in the map of CONTRIBUTING.md is in the folder of its row."""
    folder, misplaced = "", []
    for line in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines():
        if line.startswith("| ") and len(cells := line.strip("| ").split(" | ")) >= 2:
            folder = cells[0].strip("`") if line.startswith("| `") else folder
            names = FILE_NAME.findall(cells[0] if line.startswith("| | ") else cells[1])
            misplaced += [
                name
                for name in names
                if not any((parent / name).exists() for parent in (ROOT, ROOT / folder))
            ]

    assert misplaced == []


def test_contributing_names_only_functions_and_constants_that_exist() -> None:
    """A function or constant after the name of a module is in this module."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", text)
    pairs = [(path, name) for path, names in named for name in re.findall(r"`(\w+)`", names)]
    sources = {path: (ROOT / path).read_text("utf-8") for path, _ in pairs}

    assert len(pairs) > 10
    assert [pair for pair in pairs if not re.search(rf"\b{pair[1]}\b", sources[pair[0]])] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_comments_name_only_files_that_exist(path: Path) -> None:
    """Each file that a docstring or a comment names exists."""
    text = path.read_text("utf-8")
    comment_texts = re.findall(r"--.*", text) if path.suffix == ".sql" else [*iter_comments(text)]

    assert find_missing_names("\n".join(comment_texts)) == []


def find_missing_names(text: str) -> list[str]:
    """Return the files and modules that a text names and that do not exist."""
    existing_files = {path.name for path in FILES} | {str(path.relative_to(ROOT)) for path in FILES}
    files = {name for name in FILE_NAME.findall(text) if name not in EXAMPLES}
    missing_files = {name for name in files if not existing_files & {name, f"src/perdure/{name}"}}
    missing_modules = {name for name in DOTTED_NAME.findall(text) if not is_importable(name)}
    return sorted(missing_files | missing_modules)


def is_importable(dotted: str) -> bool:
    """Return whether the name is a module or an attribute of a module."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def iter_comments(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))
        if is_docstring or token.type == tokenize.COMMENT:
            yield token.string


def test_contributing_map_has_every_module() -> None:
    """CONTRIBUTING.md names each module of the library."""
    named = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    files = {package_folder(name).name for name in {*list_modules()} - {*PACKAGES}}

    assert sorted(file for file in files if not re.search(rf"\b{file}\.py\b", named)) == []


def test_reference_page_has_every_public_name() -> None:
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
def test_python_blocks_of_page_run_and_print_shown_output(
    page: Path, page_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks run in their order, and each prints the text block right below it."""
    for example, shown in iter_blocks_with_output(page):
        example.evaluate()
        printed = capsys.readouterr().out

        assert shown in (None, printed)
        assert shown != ""


def test_store_examples_of_readme_can_be_pasted_into_python(
    page_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks work line by line, as an interactive session reads them."""
    session = code.InteractiveConsole()
    blocks = [b for b in iter_blocks_with_output(PAGES[0]) if "SQLiteStore" in str(b[0].parsed)]
    assert len(blocks) == 3
    for example, shown in blocks:
        for line in [*str(example.parsed).splitlines(), ""]:
            session.push(line)

        assert (shown, "") == capsys.readouterr()


def iter_blocks_with_output(page: Path) -> Iterator[tuple[Example, str | None]]:
    """Yield each Python block of a page with the text block right below it, or None."""
    parsers: list[Any] = [PythonCodeBlockParser(), CodeBlockParser("text", lambda example: None)]
    document = Sybil(parsers).parse(page)
    examples = list(document.examples())
    for example, next_example in itertools.zip_longest(examples, examples[1:]):
        if document.text[example.start :].startswith("```python"):
            is_adjacent = (
                next_example is not None
                and not document.text[example.end : next_example.start].strip()
            )
            is_text = is_adjacent and document.text[next_example.start :].startswith("```text")
            yield example, str(next_example.parsed) if is_text else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_console_blocks_of_page_print_shown_output(page: Path, page_folder: Path) -> None:
    """The commands of a page run one after the other."""
    for example in Sybil([CodeBlockParser("console", check_session)]).parse(page).examples():
        example.evaluate()


@pytest.mark.parametrize("name", list_modules())
def test_docstring_examples_give_shown_results(name: str) -> None:
    """The doctests of the module pass."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.fixture(scope="module")
def executed_notebooks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Path, Any]:
    """Return each notebook under test after a run, or its error; two notebooks run at a time."""
    slots = asyncio.Semaphore(2)
    cases = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    notebooks = [params["notebook"] for params in cases if "notebook" in params]

    async def run(notebook: Path) -> Any:
        content = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
        client = nbclient.NotebookClient(content, timeout=120, kernel_name="python3")
        path = [str(notebook.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}  # as Jupyter has it
        async with slots:
            await client.async_execute(cwd=str(tmp_path_factory.mktemp("cwd")), env=environment)
        return content

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
def test_notebook_runs_and_prints_stored_outputs(
    notebook: Path, executed_notebooks: dict[Path, Any]
) -> None:
    """A notebook runs from top to bottom, prints its stored outputs, and is small."""
    if isinstance(executed_notebooks[notebook], BaseException):
        raise executed_notebooks[notebook]
    shown = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]

    assert collect_outputs(shown) == collect_outputs(executed_notebooks[notebook])
    assert notebook.stat().st_size < 80_000


def collect_outputs(notebook: Any) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the stdout and the displayed data of each cell.

    Stderr is left out, where matplotlib reports its search for fonts. A picture is only counted,
    since fonts differ.
    """
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return [
        (
            "".join(o.text for o in printed if o.get("name") == "stdout"),
            [{k: k == PNG or v for k, v in o.data.items()} for o in printed if "data" in o],
        )
        for printed in cells
    ]
