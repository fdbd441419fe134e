"""The bundled server starts with a user per service, whose rules are those of `leeway redis acl`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import redis

from leeway.streams import Keys, connect
from leeway_host.acl import SERVICES, setuser_arguments, user_name
from leeway_host.redis_server import find_server, free_port

from .chart_support import pick, render

PASSWORDS = {"REDIS": "admin's $word", "CONTROLLER": "a b", "TRAINER": "#x", "SAMPLER": 'q"uote'}


def test_the_script_of_the_chart_starts_a_server_with_these_users(tmp_path: Path) -> None:
    files = pick(render(), "ConfigMap", "-redis")["data"]
    port, keys = free_port(), Keys("default.demo")
    (tmp_path / "start.sh").write_text(files["start.sh"].replace("dir /data", f"dir {tmp_path}"))
    wrapper = tmp_path / "redis-server"  # an image may append arguments of its own
    wrapper.write_text(f'#!/bin/sh\nexec {find_server()} "$@" --port {port}\n')
    wrapper.chmod(0o755)
    server = subprocess.Popen(
        ["sh", str(tmp_path / "start.sh"), "--loglevel", "warning"],
        env={
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            **{f"{name}_PASSWORD": password for name, password in PASSWORDS.items()},
        },
    )
    admin = redis.Redis(port=port, password=PASSWORDS["REDIS"])
    try:
        connect(f"redis://leeway-trainer:%23x@127.0.0.1:{port}/0", wait_s=10).close()
        assert admin.config_get("loglevel") == {"loglevel": "warning"}
        for service in SERVICES:
            rules = setuser_arguments(service, PASSWORDS[service.upper()], run=keys.run)
            admin.execute_command("ACL", "SETUSER", "expected", "reset", *rules)
            assert admin.acl_getuser(user_name(service)) == admin.acl_getuser("expected")
        sampler = redis.Redis(port=port, username="leeway-sampler", password=PASSWORDS["SAMPLER"])
        sampler.xadd(keys.rollouts, {"h": "{}"})
        with pytest.raises(redis.exceptions.NoPermissionError):
            sampler.xadd(Keys("default.other").rollouts, {"h": "{}"})
        with pytest.raises(redis.exceptions.AuthenticationError):
            redis.Redis(port=port).ping()
        sampler.close()
    finally:
        admin.close()
        server.kill()
        server.wait(10)
