"""All rules by name, which of them a run applies, and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from leeway.policies.base import Policy
from leeway.registry import Registry

if TYPE_CHECKING:
    from leeway.config import SyncConfig

POLICIES = Registry("leeway.policies", "leeway.policies.rules", "POLICY", Policy, "resync policy")


def active_rules(sync: SyncConfig) -> list[str]:
    """Names of the rules that `sync` applies, in the order in which they are asked."""
    names = {*_always_active(), *sync.policies}
    return sorted(names, key=lambda name: (POLICIES[name].order, name))


def _always_active() -> list[str]:
    """Built-in rules that are configured by flat keys of `sync`."""
    return [name for name in POLICIES.builtin if POLICIES[name].settings is None]


def rule_settings(name: str, sync: SyncConfig) -> SyncConfig | BaseModel:
    """The second argument of the rule `name`."""
    model = POLICIES[name].settings
    return sync if model is None else model.model_validate(sync.policies[name])


def check_policies(policies: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The section `sync.policies` with each rule's defaults filled in.

    Raises ValueError for an unknown rule, and for settings that its model rejects.
    """
    return {name: _check_settings(name, given) for name, given in policies.items()}


def _check_settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    flat = _always_active()
    if name in flat:
        raise ValueError(
            f"policy {name!r} is always active and has no section: set the keys of `sync` that it reads"
        )
    if name not in POLICIES:
        others = [other for other in POLICIES if other not in flat]
        raise ValueError(f"unknown policy {name!r}; available: {', '.join(others) or 'none is installed'}")
    model = POLICIES[name].settings
    if model is None:
        if given:
            raise ValueError(f"{name}: this policy has no settings; expected {{}}, got {dict(given)}")
        return {}
    try:
        return model.model_validate(given).model_dump(mode="json")
    except ValidationError as exc:
        raise ValueError("; ".join(_describe(name, model, dict(error)) for error in exc.errors())) from exc


def _describe(name: str, model: type[BaseModel], error: Mapping[str, Any]) -> str:
    path = ".".join([name, *(str(part) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key; allowed: {', '.join(model.model_fields) or 'none'}"
    return f"{path}: got {error['input']!r}; {error['msg'].removeprefix('Value error, ')}"
