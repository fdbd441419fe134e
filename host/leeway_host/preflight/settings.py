"""Settings that nothing reads: keys of the configuration, and environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from leeway.config import RunConfig
from leeway.config.load import ENV_PREFIX, RESERVED_ENV
from leeway.config.unread import unread_settings
from leeway.findings import Finding
from leeway_host.preflight.site import Site

CHECK = "configuration"
GPU = Path("/dev/nvidiactl")


def check_settings(site: Site) -> list[Finding]:
    found = [*unread_keys(site.config, site.environ), *unread_variables(site.environ, site.config)]
    return found or [Finding("ok", CHECK, "every key and every environment variable is read")]


def unread_keys(config: RunConfig, environ: Mapping[str, str]) -> list[Finding]:
    """Settings that have no effect with the values of others."""
    found = [
        Finding("warning", CHECK, line, "remove the setting, or change the other one")
        for line in unread_settings(config, gpu=GPU.exists(), environ=environ)
    ]
    if config.output.save_batches:
        late = sorted(step for step in set(config.output.save_batches) if step >= config.trainer.steps)
        if late:
            found.append(
                Finding(
                    "warning",
                    CHECK,
                    f"output.save_batches names steps {late}, but the run ends after step "
                    f"{config.trainer.steps - 1}",
                    "steps are numbered from 0; correct the list or raise trainer.steps",
                )
            )
    if config.trainer.warmup_steps >= config.trainer.steps:
        found.append(
            Finding(
                "warning",
                CHECK,
                f"trainer.warmup_steps={config.trainer.warmup_steps} of trainer.steps="
                f"{config.trainer.steps}: the learning rate never reaches trainer.learning_rate",
                "lower trainer.warmup_steps",
            )
        )
    return found


def unread_variables(environ: Mapping[str, str], config: RunConfig) -> list[Finding]:
    """Environment variables that are mistaken for settings, and those that changed some.

    A name that starts with LEEWAY_ but has no section is rejected when the configuration is read.
    """
    found = []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX):
            if name.upper().replace("-", "_").startswith(ENV_PREFIX):
                proper = name.upper().replace("-", "_")
                found.append(
                    Finding("warning", CHECK, f"environment variable {name} is not read", f"write {proper}")
                )
        elif name not in RESERVED_ENV:
            found.append(
                Finding("info", CHECK, f"environment variable {name} replaces the value in the file")
            )
    found += _reserved(environ, config)
    return found


def _reserved(environ: Mapping[str, str], config: RunConfig) -> list[Finding]:
    if config.redis.url is not None:
        return []
    found = []
    if environ.get("LEEWAY_REDIS_URL"):
        found.append(
            Finding(
                "warning",
                CHECK,
                "environment variable LEEWAY_REDIS_URL is set, but leeway run does not read it: the run "
                "starts its own server",
                "write LEEWAY_REDIS__URL, with two underscores, or give --redis",
            )
        )
    if environ.get("LEEWAY_REDIS_PASSWORD"):
        found.append(
            Finding(
                "warning",
                CHECK,
                "environment variable LEEWAY_REDIS_PASSWORD is set, but redis.url is not: it has no effect",
                "give the server's address with redis.url or --redis",
            )
        )
    return found
