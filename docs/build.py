"""`make docs`: write docs/configuration.md and docs/metrics.md, and check the links between the pages.

The Helm chart's schema, which holds RunConfig as well, is written with it (charts/schema/build.py).

With --check nothing is written; the exit status is 1 when a page is not current.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from leeway.config import RunConfig
from leeway.metrics.page import metrics_page

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "configuration.md"
INTRO = """# Configuration

One YAML file describes a run. Values come, later ones winning, from the defaults, the file, the
environment (`LEEWAY_SYNC__MAX_AGE=4`: section, two underscores, key) and `--set sync.max_age=4`.
An unknown key, a wrong type or a combination that cannot work is refused with its path, its value
and what is allowed.

    leeway config show examples/quickstart.yaml     # the resolved values
    leeway config schema                            # JSON schema, for editors

This page is written by `make docs` from `leeway.config.RunConfig`.
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


def table(model: type[BaseModel], prefix: str) -> str:
    """The keys of a section that are not sections themselves, as a table."""
    properties = model.model_json_schema()["properties"]
    lines = ["| key | type | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            continue
        shown = f"`{json.dumps(field.get_default(call_default_factory=True))}`"
        description = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{prefix}{name}` | {type_name(properties[name])} | {shown} | {description} |")
    return "\n".join(lines)


def is_section(annotation: Any) -> bool:
    """True for the sections of a RunConfig."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def build_page() -> str:
    """The whole page."""
    parts = [INTRO, f"## The run\n\n{table(RunConfig, '')}\n"]
    for name, field in RunConfig.model_fields.items():
        section: Any = field.annotation
        if is_section(section):
            about = " ".join((section.__doc__ or "").split())
            parts.append(f"## {name}\n\n{about}\n\n{table(section, f'{name}.')}\n")
    return "\n".join(parts)


def broken_links() -> list[str]:
    """Relative links in README.md and docs/*.md that lead nowhere."""
    broken = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    return broken


def main() -> int:
    pages = {PAGE: build_page(), ROOT / "docs" / "metrics.md": metrics_page()}
    broken = broken_links()
    for link in broken:
        print(f"broken link: {link}", file=sys.stderr)
    chart = [sys.executable, str(ROOT / "charts" / "schema" / "build.py"), *sys.argv[1:]]
    stale_chart = subprocess.run(chart, check=False).returncode
    if "--check" in sys.argv[1:]:
        stale = [path for path, text in pages.items() if not path.exists() or path.read_text("utf-8") != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not current: run make docs", file=sys.stderr)
        return int(bool(broken) or bool(stale_chart) or bool(stale))
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} written")
    print(f"{len(broken)} broken links")
    return int(bool(broken) or bool(stale_chart))


if __name__ == "__main__":
    sys.exit(main())
