"""`make docs`: write the generated pages (configuration, metrics, methods in corrections), and check links.

Both come from the code: from RunConfig and the registry of corrections. The Helm chart's schema, which
contains RunConfig, is written as well (charts/schema/build.py).

With --check nothing is written; the exit status is 1 if a page differs from what would be written.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from leeway.config import RunConfig
from leeway.config.choice import Choice, choice_of
from leeway.corrections import METHODS
from leeway.metrics.page import metrics_page

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "configuration.md"
CORRECTIONS = ROOT / "docs" / "corrections.md"
BEGIN, END = "<!-- methods: written by make docs -->\n", "<!-- end of methods -->\n"
INTRO = """# Configuration

A run is described by one YAML file. Values are taken from the defaults, the file, the environment
(`LEEWAY_SYNC__MAX_AGE=4`: section, two underscores, key) and `--set sync.max_age=4`; later sources override
earlier ones. Unknown keys, wrong types and combinations that cannot work are rejected; the error names the
path, the value and what is allowed.

    leeway config show examples/quickstart.yaml     # the resolved values
    leeway config schema                            # JSON schema, for editors

This page is generated from `leeway.config.RunConfig` by `make docs`.
"""


def type_name(schema: dict[str, Any]) -> str:
    """A JSON schema's type in a few words: `integer >= 1`, `"token" or "sequence"`."""
    if "anyOf" in schema:
        return " or ".join(type_name(part) for part in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    name = str(schema.get("type", "any"))
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in limits.items() if key in schema]
    return " ".join([name, *bounds])


def table(
    model: type[BaseModel], prefix: str, keys: list[str] | None = None, choice: Choice[Any] | None = None
) -> str:
    """`keys` of a section (None: all that are not sections themselves) as a table."""
    properties = model.model_json_schema()["properties"]
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for name in list(model.model_fields) if keys is None else keys:
        field = model.model_fields[name]
        if is_section(field.annotation):
            continue
        default = field.get_default(call_default_factory=True)
        if choice and name == choice.key:
            default = choice.default
        shown = "required" if default is PydanticUndefined else f"`{json.dumps(default)}`"
        description = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{prefix}{name}` | {type_name(properties[name])} | {shown} | {description} |")
    return "\n".join(lines)


def is_section(annotation: Any) -> bool:
    """True for a section of RunConfig."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def build_page() -> str:
    """The whole page."""
    parts = [INTRO, f"## The run\n\n{table(RunConfig, '')}\n"]
    for name, field in RunConfig.model_fields.items():
        section: Any = field.annotation
        if not is_section(section):
            continue
        about, choice = " ".join((section.__doc__ or "").split()), choice_of(field.metadata)
        parts.append(f"## {name}\n\n{about}\n\n{table(section, f'{name}.', choice=choice)}\n")
        if choice:
            parts += [own_keys(name, choice, option) for option in choice.registry]
    return "\n".join(parts)


def own_keys(section: str, choice: Choice[Any], name: str) -> str:
    """The keys that only one kind of task, or one correction, has."""
    model = choice.model(name)
    about = " ".join((model.__doc__ or "").split())
    keys = choice.own_keys(name)
    body = table(model, f"{section}.", keys) if keys else "No further keys."
    return f"### {section} with `{choice.key}: {name}`\n\n{about}\n\n{body}\n"


def method_table() -> str:
    """All corrections: estimator, requirements, source."""
    lines = ["| `correction.method` | estimator | needs | source |", "|---|---|---|---|"]
    for name, method in METHODS.items():
        needs = ", ".join(method.needs) or "nothing beyond pi_theta"
        lines.append(f"| `{name}` | `{method.formula}` | {needs} | {method.source} |")
    return "\n".join(lines) + "\n"


def corrections_page() -> str:
    """docs/corrections.md with the table as it should be. Raises ValueError if a marker is missing."""
    text = CORRECTIONS.read_text(encoding="utf-8")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start] + "\n" + method_table() + "\n" + text[stop:]


def broken_links() -> list[str]:
    """Relative links in README.md and docs/*.md whose target does not exist."""
    broken = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    return broken


def main() -> int:
    pages = {
        PAGE: build_page(),
        CORRECTIONS: corrections_page(),
        ROOT / "docs" / "metrics.md": metrics_page(),
    }
    broken = broken_links()
    for link in broken:
        print(f"broken link: {link}", file=sys.stderr)
    chart = [sys.executable, str(ROOT / "charts" / "schema" / "build.py"), *sys.argv[1:]]
    stale_chart = subprocess.run(chart, check=False).returncode
    if "--check" in sys.argv[1:]:
        stale = [p for p, text in pages.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not current: run make docs", file=sys.stderr)
        return int(bool(broken or stale or stale_chart))
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} written")
    print(f"{len(broken)} broken links")
    return int(bool(broken or stale_chart))


if __name__ == "__main__":
    sys.exit(main())
