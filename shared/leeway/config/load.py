"""Reading a RunConfig from file, environment and command line, with errors a user can act on."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from leeway.config import CorrectionConfig, RunConfig
from leeway.config.choice import choice_of
from leeway.errors import UsageError

ENV_PREFIX = "LEEWAY_"
RESERVED_ENV = {
    "LEEWAY_CACHE_DIR",
    # what a pod is told about its place
    "LEEWAY_RUN",
    "LEEWAY_RELEASE",
    "LEEWAY_REDIS_URL",
    "LEEWAY_REDIS_PASSWORD",
}
MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
"""Values of a YAML text, counting what aliases repeat: ten nested lists of ten aliases are billions."""


class ConfigError(UsageError):
    """A configuration that cannot be run; the message has one line per problem."""


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-5 is a number, a key must not stand twice, aliases do not explode."""

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
                raise yaml.constructor.ConstructorError(None, None, "a key is no text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _count_values(node: yaml.Node, known: dict[int, int], above: set[int]) -> int:
    """Values in `node`, an alias as often as it stands. Raises ConstructorError beyond MAX_VALUES."""
    mark, key = node.start_mark, id(node)
    if key in above:
        raise yaml.constructor.ConstructorError(None, None, "a value that contains itself", mark)
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


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*)(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, source: str) -> Any:
    """YAML text to plain values. Raises ConfigError that names `source`, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(exc).split())}") from exc
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
        # What PyYAML raises for values that do not fit their tag, such as `!!timestamp x`.
        raise ConfigError(f"{source}: not valid YAML: {type(exc).__name__}: {exc}") from exc


def read_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError when it is missing, unreadable or not a mapping."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"the configuration {path} has more than {MAX_BYTES} bytes")
        text = raw.decode("utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot read the configuration {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"cannot read the configuration {path}: not UTF-8 at byte {exc.start}") from exc
    data = parse_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: expected sections such as 'model:' and 'task:', got {type(data).__name__}"
        )
    return data


def _put(data: dict[str, Any], path: list[str], value: Any, source: str) -> None:
    for depth, key in enumerate(path[:-1]):
        inner = data.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{source}: {'.'.join(path[: depth + 1])} is a value, not a section")
        data[key] = inner = dict(inner)
        data = inner
    data[path[-1]] = value


def apply_env(data: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Put `LEEWAY_SECTION__KEY=value` variables into `data`, in place."""
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in RESERVED_ENV:
            continue
        path = name[len(ENV_PREFIX) :].lower().split("__")
        if path[0] not in RunConfig.model_fields:
            raise ConfigError(
                f"environment variable {name}: there is no section or key {path[0]!r}; "
                f"expected LEEWAY_<SECTION>__<KEY>, for example LEEWAY_SYNC__MAX_AGE=4"
            )
        _put(data, path, parse_yaml(environ[name], name), name)


def apply_sets(data: dict[str, Any], sets: Iterable[str]) -> None:
    """Put `a.b=value` settings into `data`, in place; values are read as YAML."""
    for item in sets:
        path, sep, value = item.partition("=")
        if not sep or not path.strip() or not all(path.strip().split(".")):
            raise ConfigError(f"--set {item}: expected section.key=value, for example --set sync.max_age=4")
        _put(data, path.strip().split("."), parse_yaml(value, f"--set {path}"), f"--set {item}")


def _model_at(path: tuple[int | str, ...], data: Any) -> tuple[type[BaseModel] | None, str]:
    """The model of the section at `path`, and what chose it: ` for kind digits`."""
    model: type[BaseModel] = RunConfig
    chosen = ""
    for key in path:
        field = model.model_fields.get(str(key))
        if field is None:
            return None, ""
        data = data.get(key) if isinstance(data, Mapping) else None
        choice = choice_of(field.metadata)
        found = choice.model(data) if choice else field.annotation
        if not (isinstance(found, type) and issubclass(found, BaseModel)):
            return None, ""
        model = found
        chosen = f" for {choice.key} {(data or {}).get(choice.key, choice.default)}" if choice else ""
    return model, chosen


def _shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python writes
        return "a number that is too long to show"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _describe(error: Mapping[str, Any], data: Any) -> str:
    loc: tuple[int | str, ...] = error["loc"]
    path = ".".join(str(part) for part in loc) or "configuration"
    if path.startswith("redis"):
        error = {**error, "input": "***"}  # it may hold a password
    if error["type"] == "extra_forbidden":
        model, chosen = _model_at(loc[:-1], data)
        allowed = list(model.model_fields) if model else []
        close = difflib.get_close_matches(str(loc[-1]), allowed, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        value = _shown(error["input"])
        return f"{path}: unknown key{chosen} (value {value}); {hint}allowed: {', '.join(allowed)}"
    if error["type"] == "missing":
        return f"{path}: required, but not given"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{path}: {message}"
    return f"{path}: got {_shown(error['input'])} ({type(error['input']).__name__}); {message}"


def build_config(data: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Validate plain values. Raises ConfigError with path, value and what is allowed, a line each."""
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as exc:
        lines = [_describe(dict(e), data) for e in exc.errors()]
        raise ConfigError(f"{source}:\n" + "\n".join(f"  {line}" for line in lines)) from exc
    _check_method(config, source)
    return config


def _check_method(config: RunConfig, source: str) -> None:
    from leeway.corrections.names import METHOD_NAMES

    method = config.correction.method
    if method not in METHOD_NAMES:
        close = difflib.get_close_matches(method, METHOD_NAMES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"{source}:\n  correction.method: got {method!r}; {hint}allowed: {', '.join(METHOD_NAMES)}"
        )


def unused_settings(config: RunConfig) -> list[str]:
    """A line for each setting of a correction that differs from its default and that the method of the run
    does not read."""
    from leeway.corrections.names import COMMON_SETTINGS, METHOD_SETTINGS

    chosen, lines = config.correction, []
    own = METHOD_SETTINGS[chosen.method]
    for key, field in CorrectionConfig.model_fields.items():
        value = getattr(chosen, key)
        if value != field.default and key not in (*own, *COMMON_SETTINGS):
            lines.append(
                f"correction.{key}={value} changes nothing: method {chosen.method} reads {', '.join(own)}"
            )
    return lines


def load_config(
    path: str | Path, sets: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> RunConfig:
    """The resolved configuration of `path`, the environment and `--set` items (later ones win)."""
    data = read_file(path)
    apply_env(data, os.environ if environ is None else environ)
    apply_sets(data, sets)
    return build_config(data, str(path))


def redact_url(url: str) -> str:
    """The URL with its password replaced by ***."""
    scheme, sep, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    place = re.sub(r"[?#].*", "?***", place)
    user = credentials.partition(":")[0] + ":***" if ":" in credentials else credentials
    return f"{scheme}{sep}{user}{at}{place}"


def dump_config(config: RunConfig, redact: bool = True) -> str:
    """The resolved values as YAML; passwords are replaced by *** unless `redact` is false."""
    data = json.loads(config.model_dump_json())
    if redact:
        places = data["redis"]
        places["url"] = redact_url(places["url"]) if places["url"] else None
        places["service_urls"] = {name: redact_url(url) for name, url in places["service_urls"].items()}
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
