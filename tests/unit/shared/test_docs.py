"""The documentation is what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from leeway.config.load import load_config

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]


def test_the_configuration_page_is_current_and_links_lead_somewhere() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "build.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_examples_are_valid(path: Path) -> None:
    load_config(path, environ={})
