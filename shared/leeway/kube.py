"""What Leeway needs of Kubernetes: the pods of a release, and the number of its samplers.

The chart's Role (charts/leeway/templates/controller.yaml) permits these calls; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leeway.errors import LeewayError, UsageError

if TYPE_CHECKING:
    from kubernetes.client import V1Pod

RELEASE_ENV = "LEEWAY_RELEASE"
"""Environment variable with the common prefix of the names of a release's objects; the chart sets it."""
INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
NODE_NOT_READY = "its node is not ready"
IN_CLUSTER_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesError(LeewayError):
    """The API server rejected a request or did not answer."""


@dataclass(frozen=True)
class PodView:
    """The state of a pod. `reason`: why it does not run or is not ready; empty if it is healthy."""

    name: str
    component: str
    phase: str
    ready: bool
    restarts: int
    reason: str
    deleted: bool = False


def view_pod(pod: V1Pod) -> PodView:
    """The state of a pod as Leeway shows it."""
    status, meta = pod.status, pod.metadata
    conditions = {c.type: c for c in status.conditions or ()}
    containers = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    ready = conditions.get("Ready")
    return PodView(
        name=meta.name,
        component=(meta.labels or {}).get(COMPONENT, ""),
        phase=status.phase or "Unknown",
        ready=ready is not None and ready.status == "True",
        restarts=sum(c.restart_count or 0 for c in containers),
        reason=_reason(status, conditions, containers, deleted=meta.deletion_timestamp is not None),
        deleted=meta.deletion_timestamp is not None,
    )


def _reason(status: Any, conditions: dict[str, Any], containers: list[Any], deleted: bool) -> str:
    if status.phase == "Failed":
        return _words(status.reason or "Failed", status.message)
    if deleted:
        return "Terminating"
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return _words(scheduled.reason, scheduled.message)
    for container in containers:
        waiting, ended = container.state.waiting, container.last_state.terminated
        before = f"; previous run: {_words(ended.reason, f'exit code {ended.exit_code}')}" if ended else ""
        if waiting and waiting.reason not in ("PodInitializing", "ContainerCreating"):
            return f"{container.name}: {_words(waiting.reason, waiting.message)}{before}"
        if before and not container.ready and not container.state.terminated:
            return f"{container.name} restarted{before}"
    ready, alive = conditions.get("Ready"), conditions.get("ContainersReady")
    if ready and alive and ready.status != "True" and alive.status == "True":
        return NODE_NOT_READY
    return ""


def _words(reason: str | None, message: str | None) -> str:
    return ": ".join(part for part in (reason, message) if part)


def find_loss(before: PodView | None, now: PodView, gone: bool) -> str | None:
    """Why the sampler process in a pod is lost: it has ended, was replaced, or its node is unreachable.

    None while it is still there. `before`: the previous view of the pod; `gone`: the pod was deleted.
    """
    if gone:
        return "its pod was deleted"
    if now.phase == "Failed":
        return f"its pod failed ({now.reason})"
    if before is not None and now.restarts > before.restarts:
        return f"its container ended ({now.reason or 'restarted'})"
    # If the process is still running, it joins again with its next heartbeat.
    if before is not None and now.reason == NODE_NOT_READY != before.reason:
        return NODE_NOT_READY
    return None


def load_client(context: str | None = None) -> Any:
    """The package `kubernetes`, configured by the pod's service account or a kubeconfig.

    Raises UsageError if there is neither, or the package is not installed.
    """
    try:
        import kubernetes
    except ImportError as exc:
        raise UsageError("kubernetes is not installed: pip install 'leeway-rl[controller]'") from exc
    try:
        if IN_CLUSTER_NAMESPACE.exists() and context is None:
            kubernetes.config.load_incluster_config()
        else:
            kubernetes.config.load_kube_config(context=context)
    except kubernetes.config.ConfigException as exc:
        raise UsageError(f"no Kubernetes cluster is configured: {exc}; set KUBECONFIG or --context") from exc
    return kubernetes


def default_namespace() -> str:
    """The pod's own namespace, that of the kubeconfig's context, or `default`."""
    if IN_CLUSTER_NAMESPACE.exists():
        return IN_CLUSTER_NAMESPACE.read_text().strip()
    import kubernetes

    try:
        _, active = kubernetes.config.list_kube_config_contexts()
    except kubernetes.config.ConfigException:
        return "default"
    return active["context"].get("namespace") or "default"


class Cluster:
    """The objects of one release. `prefix`: common prefix of their names (the chart's fullname)."""

    def __init__(self, prefix: str, namespace: str, kubernetes: Any) -> None:
        self.prefix, self.namespace, self.kubernetes = prefix, namespace, kubernetes

    def _call(self, what: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, _request_timeout=30, **kwargs)
        except self.kubernetes.client.ApiException as exc:
            raise KubernetesError(f"{what}: the API server answered {exc.status} {exc.reason}") from exc
        except OSError as exc:
            raise KubernetesError(f"{what}: {exc}") from exc

    def pods(self) -> list[PodView]:
        """The release's pods, sorted by name."""
        api = self.kubernetes.client.CoreV1Api()
        what = f"listing pods in namespace {self.namespace}"
        found = self._call(what, api.list_namespaced_pod, self.namespace, label_selector=COMPONENT).items
        views = [view_pod(pod) for pod in found if self.owns(pod)]
        return sorted(views, key=lambda view: view.name)

    def owns(self, pod: V1Pod) -> bool:
        """Whether a pod belongs to this release."""
        component = (pod.metadata.labels or {}).get(COMPONENT, "")
        return pod.metadata.name.startswith(f"{self.prefix}-{component}")

    def watch_samplers(self, seconds: int) -> Any:
        """Events of the samplers' pods for about `seconds`: (ADDED, MODIFIED or DELETED, pod)."""
        api, watch = self.kubernetes.client.CoreV1Api(), self.kubernetes.watch.Watch()
        selector = f"{COMPONENT}=sampler"
        stream = watch.stream(
            api.list_namespaced_pod,
            self.namespace,
            label_selector=selector,
            timeout_seconds=seconds,
            _request_timeout=seconds + 30,
        )
        for event in stream:
            if self.owns(event["object"]):
                yield event["type"], event["object"]

    def scale_samplers(self, count: int) -> None:
        """Set the number of samplers. Raises KubernetesError, for example if there is no deployment."""
        api = self.kubernetes.client.AppsV1Api()
        name = f"{self.prefix}-sampler"
        self._call(
            f"scaling deployment {self.namespace}/{name}",
            api.patch_namespaced_deployment_scale,
            name,
            self.namespace,
            {"spec": {"replicas": count}},
        )
