"""The example package (tests/plugin) adds one entry to every registry, and each registry accepts it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from leeway.corrections import METHODS
from leeway.metrics import AREAS
from leeway.policies import POLICIES
from leeway.registry import Registry
from leeway.rewards import REWARDS
from leeway.tasks import KINDS
from leeway_sampler.transports import TRANSPORTS as SAMPLER_TRANSPORTS
from leeway_trainer.transports import TRANSPORTS as TRAINER_TRANSPORTS

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "tests" / "plugin" / "pyproject.toml").read_text())["project"]
REGISTRIES: list[Registry[Any]] = [
    METHODS, POLICIES, KINDS, REWARDS, TRAINER_TRANSPORTS, SAMPLER_TRANSPORTS, AREAS,
]  # fmt: skip


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's entry points are found as if pip had installed it."""
    info = tmp_path / "leeway_example_plugin-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leeway-example-plugin\nVersion: 0.1.0\n")
    groups = PROJECT["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.group)
def test_every_registry_gets_one_entry(registry: Registry[Any]) -> None:
    (name,) = PROJECT["entry-points"][registry.group]
    # A new one: a registry remembers what was installed when it was first used.
    fresh = Registry(registry.group, registry.package, registry.attribute, registry.kind, registry.what)
    assert isinstance(fresh[name], registry.kind)


def test_the_documentation_lists_the_registries() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for registry in REGISTRIES:
        assert f"| `{registry.package}` | `{registry.attribute}` | `{registry.group}` |" in page
