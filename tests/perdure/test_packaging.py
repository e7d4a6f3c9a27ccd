"""What is installed: one import package, laid out over the top-level folders."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import perdure
from tests.layout import LAYOUT, PACKAGES, ROOT, folder_of


def test_every_folder_is_declared() -> None:
    """A folder with modules that is not in `packages` would be missing after an installation."""
    found = set()
    for name, folder in LAYOUT.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((name, *inner)))

    assert found == set(PACKAGES)


def test_the_wheel_holds_perdure_and_nothing_else(tmp_path: Path) -> None:
    """All that the package reads, templates and assets too; no top-level name but `perdure`."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", tmp_path, str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"{package.replace('.', '/')}/{path.name}"
        for package in PACKAGES
        for path in folder_of(package).iterdir()
        if path.suffix in (".py", ".sql", ".typed")
    }
    for package, inner in (("stores", "weights"), ("server", "templates"), ("server", "assets")):
        files = (folder_of(f"perdure.{package}") / inner).iterdir()
        expected |= {f"perdure/{package}/{inner}/{path.name}" for path in files}

    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"perdure", f"perdure-{perdure.__version__}.dist-info"} == {
        name.split("/")[0] for name in names
    }


def test_public_names() -> None:
    """What a package exports is there, and sorted."""
    for package in ("", ".checkpointers", ".memory", ".graphs"):
        module = __import__(f"perdure{package}", fromlist=["__all__"])

        assert sorted(module.__all__) == list(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)
