"""`make chart`: values.yaml, its schema, README.md and files/ from charts/schema/values.py and RunConfig.

With --check nothing is written; the exit status is 1 if a file is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from values import OWNED, QUANTITY, RUN, ChartValues

from leeway.config import RunConfig
from leeway_host.acl import SERVICES, build_acl

HERE = Path(__file__).parent
CHART = HERE.parent / "leeway"
KUBERNETES = "v1.37.0-local-strict"
NOISE = ("description", "default", "title", "examples", "format")
Schema = dict[str, Any]


# -- schema ------------------------------------------------------------------------------------------------


@cache
def kubernetes_types() -> dict[str, Schema]:
    """Schemas of the Kubernetes types, closed at every level."""
    path = files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES / "_definitions.json"
    return json.loads(path.read_text(encoding="utf-8"))["$defs"]


class Definitions:
    """Collects referenced definitions under short names."""

    def __init__(self) -> None:
        self.done: dict[str, Schema] = {}

    def kubernetes(self, name: str) -> Schema:
        """A reference to a Kubernetes type."""
        short = name.removeprefix("io.k8s.")
        if short not in self.done:
            self.done[short] = {}
            self.done[short] = self.clean(kubernetes_types()[name], "_definitions.json#/$defs/")
            if name.endswith("resource.Quantity"):
                self.done[short] = {"type": ["string", "number", "null"], "pattern": QUANTITY, "minimum": 0}
        return {"$ref": f"#/definitions/{short}"}

    def clean(self, node: Any, prefix: str) -> Any:
        """`node` without descriptions, with its references resolved."""
        if isinstance(node, list):
            return [self.clean(item, prefix) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return self.kubernetes(node["$ref"].split("#/$defs/")[1])
        result = {}
        for key, value in node.items():
            if key == "properties":
                result[key] = {name: self.clean(part, prefix) for name, part in value.items()}
            elif key not in NOISE and not key.startswith("x-kubernetes"):
                result[key] = self.clean(value, prefix)
        return result


def plain(node: Any, defs: dict[str, Schema], kube: Definitions) -> Any:
    """A pydantic schema with its internal references inlined and its Kubernetes types as references."""
    if isinstance(node, list):
        return [plain(item, defs, kube) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        inner = plain(defs[node["$ref"].removeprefix("#/$defs/")], defs, kube)
        return {**inner, **({"description": node["description"]} if "description" in node else {})}
    if "k8s" in node:
        reference = kube.kubernetes(node["k8s"])
        return {"type": "array", "items": reference} if node["many"] else reference
    if "allOf" in node and len(node["allOf"]) == 1:
        return plain({**node["allOf"][0], **{k: v for k, v in node.items() if k != "allOf"}}, defs, kube)
    result = {}
    for key, value in node.items():
        if key == "properties":
            result[key] = {name: plain(part, defs, kube) for name, part in value.items()}
        elif key not in ("title", "default", "$defs", "examples", "discriminator"):
            result[key] = plain(value, defs, kube)
    return result


def run_schema() -> Schema:
    """The schema of `run`: RunConfig without the keys that the chart sets.

    Required keys are required only if `run` is not empty.
    """
    raw = RunConfig.model_json_schema()
    schema = plain(raw, raw.get("$defs", {}), Definitions())
    for section, keys in OWNED.items():
        for key in keys:
            schema["properties"][section]["properties"].pop(key, None)
    for section, key in (("correction", "method"), ("task", "kind")):
        options = schema["properties"][section]["oneOf"]
        names = [option["properties"][key]["const"] for option in options]
        options.append(from_another_package(key, names))
    required = schema.pop("required")
    return {**schema, "if": {"minProperties": 1}, "then": {"required": required}}


def from_another_package(key: str, names: list[str]) -> Schema:
    """A correction or a task from a package that is installed in the image: the services check its keys."""
    return {
        "type": "object",
        "properties": {key: {"type": "string", "not": {"enum": names}}},
        "required": [key],
    }


def build_schema() -> Schema:
    """values.schema.json."""
    kube = Definitions()
    raw = ChartValues.model_json_schema(by_alias=True)
    schema = plain(raw, raw["$defs"], kube)
    schema["properties"]["run"] = run_schema()
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart leeway"}
    return {**head, **schema, "definitions": kube.done}


# -- values.yaml and README --------------------------------------------------------------------------------


def fields(model: type[BaseModel]) -> Iterator[tuple[str, str, Any]]:
    """(key, description, default as plain data) of every field of a level."""
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        yield field.alias or name, " ".join((field.description or "").split()), default


def as_plain(value: Any) -> Any:
    """A default as YAML writes it."""
    return value.model_dump(by_alias=True) if isinstance(value, BaseModel) else value


def yaml_level(value: BaseModel, depth: int) -> Iterator[str]:
    """Lines of a level and the levels below it, each key under its description."""
    pad = "  " * depth
    for key, about, _ in fields(type(value)):
        attribute = "global_" if key == "global" else key
        inner = getattr(value, attribute)
        if isinstance(inner, BaseModel):
            about = about or " ".join((type(inner).__doc__ or "").split())
        width = 110 - len(pad)
        words, line = about.split(), "#"
        for word in words:
            if len(line) + len(word) + 1 > width:
                yield pad + line
                line = "#"
            line += f" {word}"
        if words:
            yield pad + line
        if isinstance(inner, BaseModel):
            yield f"{pad}{key}:"
            yield from yaml_level(inner, depth + 1)
        else:
            text = yaml.safe_dump(inner, default_flow_style=True, width=10_000, sort_keys=False).strip()
            yield f"{pad}{key}: {text.removesuffix('...').strip()}"


def build_values() -> str:
    """values.yaml."""
    head = ["# Default values of the chart leeway, written by `make chart` from charts/schema/values.py.", ""]
    return "\n".join([*head, *yaml_level(ChartValues(), 0)]) + "\n"


def rows(value: BaseModel, prefix: str) -> Iterator[str]:
    """Table rows of a level and the levels below it."""
    for key, about, _ in fields(type(value)):
        inner = getattr(value, "global_" if key == "global" else key)
        if isinstance(inner, BaseModel):
            yield from rows(inner, f"{prefix}{key}.")
        else:
            shown = json.dumps(as_plain(inner)).replace("|", "\\|")
            yield f"| `{prefix}{key}` | `{shown}` | {about.replace('|', chr(92) + '|')} |"


def leaves(value: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
    """(dotted path, default) of every key that is not a level itself."""
    for key, _, _ in fields(type(value)):
        inner = getattr(value, "global_" if key == "global" else key)
        if isinstance(inner, BaseModel):
            yield from leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def build_defaults() -> str:
    """files/defaults.yaml: the meaning of a key that is null or missing, whose default Helm deletes."""
    head = (
        "# Default of every key, by its path, written by `make chart`; see leeway.defaults in _helpers.tpl."
    )
    lines = (f"{path}: {json.dumps(as_plain(default))}" for path, default in leaves(ChartValues(), ""))
    return "\n".join([head, *lines]) + "\n"


def build_users() -> str:
    """files/users.yaml: the rules of each service's user on the bundled server, for the run RUN."""
    rules = {service: " ".join(build_acl(service, "RUN")) for service in SERVICES}
    head = "# Rules of the users of the bundled Redis, written by `make chart` from host/leeway_host/acl.py."
    return f"{head}\n{yaml.safe_dump(rules, width=10_000, sort_keys=False)}"


def build_readme() -> str:
    """The chart's README: charts/schema/readme.md followed by the tables."""
    parts = [(HERE / "readme.md").read_text(encoding="utf-8").rstrip(), ""]
    head = ["| key | default | |", "|---|---|---|"]
    top = ChartValues()
    own = [line for line in rows(top, "") if "." not in line.split("`")[1]]
    parts += ["### General", "", *head, *own, ""]
    for key, _, _ in fields(ChartValues):
        inner = getattr(top, "global_" if key == "global" else key)
        if isinstance(inner, BaseModel):
            about = " ".join((type(inner).__doc__ or "").split())
            parts += [f"### {key}", "", about, "", *head, *rows(inner, f"{key}."), ""]
    parts += ["### run: keys that the chart sets", "", "These keys are rejected under `run`.", ""]
    parts += ["| key | use instead |", "|---|---|"]
    parts += [f"| `run.{s}.{k}` | {other} |" for s, keys in OWNED.items() for k, other in keys.items()]
    return "\n".join(parts) + "\n"


def main() -> int:
    outputs = {
        "values.schema.json": json.dumps(build_schema(), separators=(",", ":"), sort_keys=True) + "\n",
        "values.yaml": build_values(),
        "README.md": build_readme(),
        "files/defaults.yaml": build_defaults(),
        "files/users.yaml": build_users(),
        "files/demo.yaml": yaml.safe_dump(RUN, sort_keys=False),
    }
    stale = [
        name
        for name, text in outputs.items()
        if not (CHART / name).exists() or (CHART / name).read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"charts/leeway/{name} is out of date: run `make chart`", file=sys.stderr)
        return int(bool(stale))
    for name in stale:
        (CHART / name).parent.mkdir(exist_ok=True)
        (CHART / name).write_text(outputs[name], encoding="utf-8")
        print(f"charts/leeway/{name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
