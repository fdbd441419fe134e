"""Reading a RunConfig from file, environment and command line, and writing one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from leeway.config.explain import explain
from leeway.config.read_yaml import parse_yaml, read_file
from leeway.config.run import RunConfig
from leeway.errors import ConfigError

ENV_PREFIX = "LEEWAY_"
RESERVED_ENV = {
    "LEEWAY_CACHE_DIR",
    # what the chart tells a pod
    "LEEWAY_RUN",
    "LEEWAY_RELEASE",
    "LEEWAY_REDIS_URL",
    "LEEWAY_REDIS_PASSWORD",
}


def _put(data: dict[str, Any], path: list[str], value: Any, source: str) -> None:
    for depth, key in enumerate(path[:-1]):
        inner = data.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{source}: {'.'.join(path[: depth + 1])} is a value, not a section")
        data[key] = inner = dict(inner)
        data = inner
    data[path[-1]] = value


def apply_env(data: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Put the variables `LEEWAY_SECTION__KEY=value` into `data`, in place."""
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


def build_config(data: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Validate plain values. Raises ConfigError with path, value and what is allowed, a line each."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as exc:
        lines = [explain(dict(error), data) for error in exc.errors()]
        raise ConfigError(f"{source}:\n" + "\n".join(f"  {line}" for line in lines)) from exc


def load_config(
    path: str | Path, sets: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> RunConfig:
    """The resolved configuration of `path`, the environment and `--set` items (later ones win)."""
    data = read_file(path)
    apply_env(data, os.environ if environ is None else environ)
    apply_sets(data, sets)
    return build_config(data, str(path))


def redact_url(url: str) -> str:
    """`url` with its password replaced by ***."""
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
