"""YAML as people write configurations: strict about duplicate keys, and bounded in size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from leeway.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
"""Maximum number of values in a YAML text. Aliases count each time: ten nested lists of ten are billions."""


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-5 is a number, duplicate keys are rejected, aliases cannot explode."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _count_values(node, {}, set())
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        own = [key_node for key_node, _ in node.value if key_node.tag != "tag:yaml.org,2002:merge"]
        for key_node in own:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be text, a number, a boolean or null", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key!r}", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _count_values(node: yaml.Node, known: dict[int, int], above: set[int]) -> int:
    """Number of values in `node`; aliases count each time. Raises ConstructorError above MAX_VALUES."""
    mark, key = node.start_mark, id(node)
    if key in above:
        raise yaml.constructor.ConstructorError(None, None, "a value contains itself", mark)
    if key not in known:
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        known[key] = 1 + sum(_count_values(child, known, above | {key}) for child in children)
    if known[key] > MAX_VALUES:
        raise yaml.constructor.ConstructorError(None, None, f"more than {MAX_VALUES} values", mark)
    return known[key]


def _plain_integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    """An integer, unless YAML reads it otherwise than people do: 010 is 8 there, and 1:30 is 90."""
    if re.fullmatch(r"[-+]?(0[0-9_]+|.*:.*)", node.value):
        value = loader.construct_yaml_int(node)
        raise yaml.constructor.ConstructorError(
            None,
            None,
            f"{node.value} is {value} in YAML: write {value}, or quotes around a text",
            node.start_mark,
        )
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _plain_integer)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*)(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, source: str) -> Any:
    """Plain values from YAML text. Raises ConfigError that names `source`, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(exc).split())}") from exc
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
        # What PyYAML raises for values that do not fit their tag, such as `!!timestamp x`.
        raise ConfigError(f"{source}: not valid YAML: {type(exc).__name__}: {exc}") from exc


def read_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError if it is missing, unreadable or not a mapping."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"configuration {path}: more than {MAX_BYTES} bytes")
        text = raw.decode("utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot read configuration {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"cannot read configuration {path}: not UTF-8 at byte {exc.start}") from exc
    data = parse_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: expected sections such as 'model:' and 'task:', got {type(data).__name__}"
        )
    return data
