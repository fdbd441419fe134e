"""Registries: names without imports, errors that name what is wrong, entries of installed packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from leeway.errors import UsageError
from leeway.registry import Registry

GROUP = "leeway.test_things"


@pytest.fixture
def things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[str]:
    """A registry of strings with the built-in entries `is` and `plain`, and room for installed ones."""
    package = tmp_path / "registry_things"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plain.py").write_text("THING = 'plain thing'\n")
    (package / "is_.py").write_text("THING = 'keyword'\n")
    (package / "broken.py").write_text("THING = 7\n")
    (package / "_hidden.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("registry_things")]:
        monkeypatch.delitem(sys.modules, name)
    return Registry(GROUP, "registry_things", "THING", str, "thing")


def install(where: Path, name: str, entries: str, module: str = "") -> None:
    """What an installed distribution leaves on the path."""
    info = where / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
    (where / f"{name}.py").write_text(module)


def test_names_come_without_importing_anything(things: Registry[str]) -> None:
    assert list(things) == ["broken", "is", "plain"]
    assert "plain" in things
    assert len(things) == 3
    assert "registry_things.plain" not in sys.modules
    assert things["is"] == "keyword"


def test_an_unknown_name_is_answered_with_the_nearest(things: Registry[str]) -> None:
    with pytest.raises(UsageError, match="unknown thing 'plian'; did you mean 'plain'"):
        things["plian"]


def test_an_entry_of_the_wrong_type_is_refused(things: Registry[str]) -> None:
    with pytest.raises(UsageError, match=r"thing 'broken': expected an instance of builtins.str, got int"):
        things["broken"]


def test_an_installed_entry_is_found(things: Registry[str], tmp_path: Path) -> None:
    install(tmp_path, "other", "theirs = other:VALUE", "VALUE = 'installed'\n")
    assert list(things) == ["broken", "is", "plain", "theirs"]
    assert things["theirs"] == "installed"


def test_an_installed_entry_that_cannot_be_loaded_names_its_package(
    things: Registry[str], tmp_path: Path
) -> None:
    install(tmp_path, "torn", "theirs = torn:VALUE", "import no_such_module\n")
    with pytest.raises(UsageError, match="'theirs' of package torn cannot be loaded.*no_such_module"):
        things["theirs"]


def test_an_installed_entry_never_replaces_a_built_in_one(things: Registry[str], tmp_path: Path) -> None:
    install(tmp_path, "rude", "plain = rude:VALUE", "VALUE = 'x'\n")
    with pytest.raises(UsageError, match="'plain' of package rude has the name of a built-in thing"):
        list(things)


def test_two_packages_cannot_claim_one_name(things: Registry[str], tmp_path: Path) -> None:
    install(tmp_path, "first", "theirs = first:VALUE", "VALUE = 'x'\n")
    install(tmp_path, "second", "theirs = second:VALUE", "VALUE = 'x'\n")
    with pytest.raises(UsageError, match="declared by both package"):
        list(things)
