"""A method of an installed package: found by its entry point, without a line in Leeway."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from correction_support import Prefix

from leeway.config import RunConfig, build_correction
from leeway.config.load import build_config
from leeway.corrections import METHODS, surrogate_loss
from leeway.errors import ConfigError

MODULE = '''
"""A times a constant.

    A scale s(a)
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leeway.config import CorrectionConfig
from leeway.corrections import Method


class TheirsConfig(CorrectionConfig):
    """Every token has the weight `scale`."""

    method: Literal["theirs"] = "theirs"
    scale: float = Field(default=1.0, gt=0)
    """Weight of every token."""


def loss(batch, config):
    from leeway.corrections.weighted import weight_metrics

    w = config.scale + 0 * batch.logp.detach()
    return -batch.advantages * w * batch.logp, weight_metrics(w, w, batch.mask)


METHOD = Method(settings=TheirsConfig, formula="A scale s(a)", needs=(), source="a test", loss=loss)
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the path with a package that declares the method `theirs`."""
    (tmp_path / "their_method.py").write_text(MODULE)
    info = tmp_path / "their_method-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-method\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[leeway.corrections]\ntheirs = their_method:METHOD\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    forget()
    yield tmp_path
    forget()
    sys.modules.pop("their_method", None)


def forget() -> None:
    """Let the registry look for installed packages again."""
    METHODS.__dict__.pop("_installed", None)
    METHODS._loaded.pop("theirs", None)


@pytest.mark.usefixtures("installed")
def test_it_is_configured_and_trains() -> None:
    config = build_config({"task": {"kind": "digits"}, "correction": {"method": "theirs", "scale": 2.0}})
    assert config.correction.model_dump(exclude_defaults=True) == {"scale": 2.0}
    p = Prefix(1)
    got = p.gradient("theirs", p.batch(3, 0.7), scale=2.0)
    assert torch.allclose(got, 1.4 * p.score(3).detach(), rtol=1e-12)
    loss, metrics = surrogate_loss(p.batch(3, 0.7), build_correction({"method": "theirs"}))
    assert torch.isfinite(loss) and float(metrics["weight/mean"]) == 1


@pytest.mark.usefixtures("installed")
def test_its_keys_are_checked_and_are_in_the_schema() -> None:
    with pytest.raises(ConfigError, match="did you mean 'scale'. method theirs allows: scale, advantage, "):
        build_config({"task": {"kind": "digits"}, "correction": {"method": "theirs", "scal": 2.0}})
    schema = RunConfig.model_json_schema()
    assert "theirs" in schema["properties"]["correction"]["discriminator"]["mapping"]
    assert schema["$defs"]["TheirsConfig"]["required"] == ["method"]


def test_the_command_lists_it(installed: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); from leeway_host.cli.app import main; main()"
    command = [sys.executable, "-c", code, "corrections", "show", "theirs"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "A scale s(a)" in done.stdout
    assert "correction.scale: 1.0  Weight of every token." in done.stdout


def test_without_the_package_the_name_is_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown correction 'theirs'"):
        build_config({"task": {"kind": "digits"}, "correction": {"method": "theirs"}})
