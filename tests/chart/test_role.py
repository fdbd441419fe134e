"""The controller's Role holds exactly what the controller calls."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes
import pytest

from leeway.kube import Cluster
from leeway_controller.lease import Leadership

from .chart_support import CHART, pick, render

Call = tuple[str, str, str, str]
"""(API group, resource, name or empty, verb)"""
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class ApiServer:
    """Answers like an API server with one pod, and writes down what it was asked."""

    def __init__(self) -> None:
        self.calls: set[Call] = set()
        self.objects: dict[str, Any] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                status, reply = outer.answer(self.command, self.path, body)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(reply).encode() + b"\n")

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        url = urlsplit(path)
        words = url.path.strip("/").split("/")
        group = "" if words[0] == "api" else words[1]
        resource, *rest = words[words.index("namespaces") + 2 :]
        name = rest[0] if rest else ""
        if len(rest) > 1:
            resource = f"{resource}/{rest[1]}"
        query = parse_qs(url.query)
        verb = VERBS.get(method) or ("get" if name else "watch" if "watch" in query else "list")
        self.calls.add((group, resource, name, verb))
        pod = {"metadata": {"name": "demo-leeway-sampler-a", "labels": {}}, "status": {"phase": "Running"}}
        pod["metadata"]["labels"] = {"app.kubernetes.io/component": "sampler"}  # type: ignore[index]
        if verb == "watch":
            return 200, {"type": "ADDED", "object": {"apiVersion": "v1", "kind": "Pod", **pod}}
        if verb == "list":
            return 200, {"kind": "PodList", "apiVersion": "v1", "items": [pod]}
        if verb in ("create", "update"):
            name = name or body["metadata"]["name"]
            held = self.objects.get(name, body)["metadata"].get("resourceVersion")
            if verb == "update" and body["metadata"].get("resourceVersion") != held:
                return 409, {"code": 409, "reason": "Conflict"}
            self.objects[name] = body
            body["metadata"]["resourceVersion"] = str(int(held or 0) + 1)
        if verb == "get" and name not in self.objects:
            return 404, {"code": 404, "reason": "NotFound"}
        return 200, self.objects.get(name or "", body)


LEASE = "demo-leeway-controller"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer()
    server.objects[LEASE] = pick(render(CHART / "examples" / "cpu.yaml"), "Lease", LEASE)
    configuration = kubernetes.client.Configuration()
    configuration.host = f"http://127.0.0.1:{server.server.server_address[1]}"
    monkeypatch.setattr(kubernetes.client.Configuration, "_default", configuration)
    yield server
    server.server.shutdown()


def test_role_equals_the_recorded_calls(api: ApiServer) -> None:
    cluster = Cluster("demo-leeway", "default", kubernetes)
    assert [view.name for view in cluster.pods()] == ["demo-leeway-sampler-a"]
    assert [kind for kind, _ in cluster.watch_samplers(1)][:1] == ["ADDED"]
    cluster.scale_samplers(3)
    leadership = Leadership(kubernetes, LEASE, "default", "me", lease_s=5)
    leadership.start()
    assert leadership.leading.wait(10)
    deadline = time.monotonic() + 15
    lease = ("coordination.k8s.io", "leases", LEASE, "update")
    while lease not in api.calls and time.monotonic() < deadline:
        time.sleep(0.1)
    leadership.release()

    rules = pick(render(CHART / "examples" / "cpu.yaml"), "Role")["rules"]
    allowed = {
        (group, resource, name, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }
    assert api.calls == allowed


def test_a_released_lease_is_taken_at_once(api: ApiServer) -> None:
    first = Leadership(kubernetes, LEASE, "default", "a", lease_s=60)
    first.start()
    assert first.leading.wait(10)
    second = Leadership(kubernetes, LEASE, "default", "b", lease_s=60)
    second.start()
    assert not second.leading.wait(1)
    first.release()
    assert second.leading.wait(20), "the lease of a minute was not given back"


def test_a_lease_that_went_with_its_release_is_not_made_again(api: ApiServer) -> None:
    leadership = Leadership(kubernetes, LEASE, "default", "me", lease_s=5)
    leadership.start()
    assert leadership.leading.wait(10)
    del api.objects[LEASE]
    assert leadership.lost.wait(20)
    assert LEASE not in api.objects
