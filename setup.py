"""Build the README for package indexes, and make the source distribution reproducible.

All other metadata is in pyproject.toml.
"""

import gzip
import os
import re
import tarfile
import tomllib
from io import BytesIO
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
# Modification time of the files in a source distribution, in seconds since 1970, if
# SOURCE_DATE_EPOCH is not set. The value is 1980-01-01, the oldest date that a wheel can contain.
DEFAULT_EPOCH = 315_532_800
# A link or an image in Markdown: the exclamation mark of an image, the text, and the target
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)")


def make_links_absolute(markdown: str, source_url: str | None) -> str:
    """Return a Markdown text whose relative links point into the repository on the web.

    A package index does not have the files to which relative links point. If the URL of the
    repository is not known, the text of each link is kept without its target, and images are
    removed. Links within the page are kept.

    Args:
        markdown: The text.
        source_url: The URL of the repository's files on its main branch, without a final slash.
    """

    def replace_link(match: re.Match[str]) -> str:
        is_image, text, target = match.groups()
        if target.startswith("#") or "://" in target:
            return match[0]
        if source_url is None:
            return "" if is_image else text
        raw = "?raw=true" if is_image else ""
        return f"{is_image}[{text}]({source_url}/{target}{raw})"

    return LINK.sub(replace_link, markdown)


def build_readme() -> str:
    """Return the README with absolute links."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Source")
    source_url = None if repository is None else f"{repository.rstrip('/')}/blob/main"
    return make_links_absolute((ROOT / "README.md").read_text(encoding="utf-8"), source_url)


def make_archive_reproducible(path: Path, epoch: int) -> None:
    """Rewrite a .tar.gz file so that its bytes depend only on names and contents of its files."""
    with tarfile.open(path) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        contents = [archive.extractfile(member) for member in members]
        files = [None if content is None else content.read() for content in contents]
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member, data in zip(members, files, strict=True):
            clean = tarfile.TarInfo(member.name)
            clean.type, clean.mtime, clean.size = member.type, epoch, len(data or b"")
            clean.mode = 0o755 if member.isdir() else 0o644
            archive.addfile(clean, None if data is None else BytesIO(data))


class ReproducibleSdist(sdist):
    """Build a source distribution that has the same bytes each time."""

    def make_distribution(self) -> None:
        """Build the archives, and rewrite them without times, owners and permissions."""
        super().make_distribution()
        epoch = int(os.environ.get("SOURCE_DATE_EPOCH", DEFAULT_EPOCH))
        for path in self.archive_files:
            make_archive_reproducible(Path(path), epoch)


setup(
    long_description=build_readme(),
    long_description_content_type="text/markdown",
    cmdclass={"sdist": ReproducibleSdist},
)
