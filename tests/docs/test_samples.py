"""Commands and configurations in the documentation are ones that Leeway accepts."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from leeway.config.load import load_config
from leeway_host.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def code_lines(text: str) -> Iterator[str]:
    """Lines of a page's shell blocks, indented or fenced; a line with open quotes is joined to the next."""
    fenced = [body for language, body in FENCE.findall(text) if language in ("", "sh", "shell", "bash")]
    indented = re.findall(r"(?:^(?: {4,}.*)\n)+", FENCE.sub("", text), re.MULTILINE)
    for block in [*fenced, *indented]:
        pending = ""
        for line in textwrap.dedent(block).splitlines():
            pending += line
            if pending.endswith("\\"):
                pending = pending[:-1]
            elif pending.count("'") % 2 == 0 or not command(pending):
                yield pending
                pending = ""


def command(line: str) -> str:
    """The part of a line from `leeway` on, or nothing if the line does not run it."""
    found = re.match(r"(?:[A-Z_]+=\S+ )*(?:kubectl [^#]* -- )?(?:\.venv/bin/)?leeway (?=[a-z-])(.*)", line)
    return found[1] if found else ""


def documented() -> Iterator[tuple[str, str]]:
    """(page, arguments of the command) of every call of `leeway` in the documentation."""
    for page in PAGES:
        for line in code_lines(page.read_text(encoding="utf-8")):
            if arguments := command(line):
                yield page.name, arguments


def parse(line: str) -> None:
    """Parse the arguments of `leeway` up to a redirection, without running it; raises on errors."""
    arguments = shlex.split(line.partition(" > ")[0], comments=True)
    context = typer.main.get_command(app).make_context("leeway", arguments)
    while hasattr(context.command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, inner, rest = context.command.resolve_command(context, rest)
        context = inner.make_context(name, rest, parent=context)


@pytest.mark.parametrize(("page", "arguments"), sorted(set(documented())))
def test_commands_exist(page: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in the controller's pod, where `leeway` knows its run.
    monkeypatch.setenv("LEEWAY_RUN", "rl.my-run")
    monkeypatch.setenv("LEEWAY_REDIS_URL", "redis://localhost:6379/0")
    parse(arguments)


def test_commands_were_found() -> None:
    pages = {page for page, _ in documented()}
    assert {"README.md", "try.md", "run.md", "kubernetes.md", "lab.md"} <= pages


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    used = set()
    for page in [*PAGES, ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md"]:
        text = page.read_text(encoding="utf-8")
        shown = [*code_lines(text), *re.findall(r"`([^`]+)`", text.replace("\n", " "))]
        for line in shown:
            if found := re.match(r"make ((?:[a-z-]+ ?)+)", line):
                used.update(found[1].split())
    assert {"setup", "test", "docs", "images"} <= used
    assert used <= targets


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("run examples/tiny.yaml --sampler 2", "No such option: --sampler"),
        ("corrections compre runs/cmp", "No such command 'compre'"),
        ("report runs/a runs/b", "unexpected extra argument"),
    ],
)
def test_wrong_commands_are_noticed(wrong: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        parse(wrong)


def test_the_readme_shows_the_example() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = [body for language, body in FENCE.findall(readme) if language == "yaml"]
    assert yaml.safe_load(shown) == yaml.safe_load((ROOT / "examples" / "gcd.yaml").read_text())
    load_config(ROOT / "examples" / "gcd.yaml", environ={})
