"""The documentation site builds in strict mode: links, anchors, included files and packages resolve."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BY_HAND = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "charts/leeway/README.md"]
"""Pages outside the site."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)")
    found = {url for page in site.glob("*.html") for url in loaded.findall(page.read_text(encoding="utf-8"))}
    assert not found


def test_the_api_reference_is_made_of_docstrings(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    assert 'id="leeway.registry.Registry"' in text
    assert "Listing the names imports nothing" in text


@pytest.mark.parametrize("name", BY_HAND)
def test_links_lead_to_files(name: str) -> None:
    page = ROOT / name
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert not [t for t in targets if "://" not in t and not (page.parent / t).exists()]
