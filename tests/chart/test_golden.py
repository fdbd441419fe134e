"""What matters in the manifests, so that a change of it is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from leeway.config.load import load_config

from .chart_support import CHART, EXAMPLES, Doc, pick, pod_of, render, workloads
from .test_render import HPA_METRIC

CPU = CHART / "examples" / "cpu.yaml"
PARTS = ("sampler", "trainer", "controller", "redis")


def container(doc: Doc) -> Doc:
    return pod_of(doc)["containers"][0]


def environment(doc: Doc) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container(doc)["env"]}


def test_probes() -> None:
    parts = workloads(render())
    sampler = container(parts["sampler"])
    startup = sampler["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 2700, "45 minutes for a load"
    assert sampler["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert sampler["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container(parts["trainer"])["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container(parts["trainer"])["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container(parts["controller"])["livenessProbe"]["httpGet"]["path"] == "/healthz"
    ports = {p["name"]: p["containerPort"] for p in sampler["ports"]}
    assert ports == {"http": 8080, "metrics": 9464}
    assert sampler["command"][-4:] == ["--port", "8080", "--metrics-port", "9464"]


def test_a_sampler_drains_before_it_ends() -> None:
    docs = render(CHART / "examples" / "one-node-8-gpus.yaml")
    spec = pod_of(workloads(docs)["sampler"])
    assert (
        "kill -TERM 1" in container(workloads(docs)["sampler"])["lifecycle"]["preStop"]["exec"]["command"][-1]
    )
    drain = yaml.safe_load(pick(docs, "ConfigMap", "-run")["data"]["run.yaml"])["sampler"]["drain_s"]
    assert spec["terminationGracePeriodSeconds"] >= drain + 30


@pytest.mark.parametrize("part", [*PARTS, "test"])
def test_nothing_runs_with_rights(part: str) -> None:
    spec = pod_of(workloads(render())[part])
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"] is True and pod["runAsUser"] > 0
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in (*spec.get("initContainers", ()), *spec["containers"]):
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert spec["automountServiceAccountToken"] is (part == "controller")
    assert spec["enableServiceLinks"] is False


def test_selectors_do_not_change() -> None:
    """They are immutable: an upgrade that changes one is refused by Kubernetes."""
    docs = render(CPU, name="demo")
    for part in PARTS:
        doc = workloads(docs)[part]
        assert doc["spec"]["selector"]["matchLabels"] == {
            "app.kubernetes.io/name": "leeway",
            "app.kubernetes.io/instance": "demo",
            "app.kubernetes.io/component": part,
        }
        assert doc["metadata"]["name"] == f"demo-leeway-{part}"
        if doc["kind"] == "StatefulSet":
            assert doc["spec"]["serviceName"] == f"demo-leeway-{part}"
            assert "volumeClaimTemplates" not in doc["spec"]
    changed = render(CPU, run__seed=7, sampler__replicas=5, trainer__podLabels={"a": "b"}, sampler__gpus=1)
    for part in PARTS:
        assert workloads(changed)[part]["spec"]["selector"] == workloads(docs)[part]["spec"]["selector"]


def test_a_changed_run_restarts_its_pods_and_no_other() -> None:
    def checksums(**sets: Any) -> dict[str, str]:
        parts = workloads(render(CPU, **sets))
        return {p: parts[p]["spec"]["template"]["metadata"]["annotations"]["checksum/config"] for p in PARTS}

    before, after = checksums(), checksums(run__trainer__steps=41)
    assert before["redis"] == after["redis"]
    assert all(before[p] != after[p] for p in ("sampler", "trainer", "controller"))
    assert checksums(sampler__replicas=7) == before, "scaling restarts nothing"


def test_gpus() -> None:
    docs = render(sampler__gpus=2, trainer__gpus=4, global__gpuResource="amd.com/gpu")
    parts = workloads(docs)
    assert container(parts["sampler"])["resources"]["limits"] == {"amd.com/gpu": "2"}
    assert container(parts["trainer"])["resources"]["limits"] == {"amd.com/gpu": "4"}
    run = yaml.safe_load(pick(docs, "ConfigMap", "-run")["data"]["run.yaml"])
    assert run["sampler"]["tensor_parallel_size"] == 2 and run["trainer"]["ranks"] == 4
    assert "--standalone --nproc-per-node=4" in container(parts["trainer"])["command"][2]
    assert container(parts["sampler"])["image"].endswith("-cuda")
    for part in workloads(render(CPU)).values():
        assert "gpu" not in str(container(part).get("resources", {}))
    assert container(workloads(render(CPU))["sampler"])["image"].endswith("-cpu")


def test_several_trainer_pods_meet_over_their_headless_service() -> None:
    docs = render(trainer__replicas=3, trainer__gpus=8, trainer__persistence__accessModes=["ReadWriteMany"])
    trainer = workloads(docs)["trainer"]
    command = container(trainer)["command"][2]
    assert "--nnodes=3 --rdzv-backend=c10d" in command
    assert "--rdzv-endpoint=demo-leeway-trainer-0.demo-leeway-trainer:29400" in command
    assert "--local-addr=$POD_NAME.demo-leeway-trainer " in command
    assert trainer["spec"]["podManagementPolicy"] == "Parallel"
    service = pick(docs, "Service", "-trainer")["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    assert yaml.safe_load(pick(docs, "ConfigMap", "-run")["data"]["run.yaml"])["trainer"]["ranks"] == 24


def test_a_trainer_that_is_started_again_goes_on() -> None:
    command = container(workloads(render(CPU))["trainer"])["command"]
    assert command[command.index("--resume") + 1] == "auto" and "--stay" in command


def test_shared_memory() -> None:
    spec = pod_of(workloads(render(trainer__shmSize="3Gi"))["trainer"])
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}} in spec["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]


def test_what_stays_after_uninstall() -> None:
    docs = render(modelCache__enabled=True)
    kept = {
        d["metadata"]["name"]
        for d in docs
        if d["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    assert kept == {"demo-leeway-trainer", "demo-leeway-models"}


def test_bundled_redis() -> None:
    docs = render(redis__maxmemoryMiB=1024)
    config = pick(docs, "ConfigMap", "-redis")["data"]["start.sh"].splitlines()
    for line in ("maxmemory 1024mb", "maxmemory-policy noeviction", "appendonly yes"):
        assert line in config
    server = workloads(docs)["redis"]
    assert container(server)["resources"]["limits"]["memory"] == "1536Mi"
    assert container(server)["image"] == "docker.io/library/redis:7.2-bookworm"
    passwords = pick(docs, "Secret", "-redis")["data"]
    assert len(set(passwords.values())) == 4 and all(len(value) >= 32 for value in passwords.values())
    for part in ("sampler", "trainer", "controller"):
        where = environment(workloads(docs)[part])
        assert where["LEEWAY_REDIS_URL"] == f"redis://leeway-{part}@demo-leeway-redis:6379/0"
        key = {"name": "demo-leeway-redis", "key": f"{part}-password"}
        assert where["LEEWAY_REDIS_PASSWORD"] == {"secretKeyRef": key}


def test_external_redis() -> None:
    docs = render(CHART / "examples" / "external-redis-tls.yaml")
    assert "redis" not in workloads(docs) and not [d for d in docs if d["kind"] == "Secret"]
    for part in ("sampler", "trainer", "controller"):
        where = environment(workloads(docs)[part])
        assert where["LEEWAY_REDIS_URL"] == f"rediss://leeway-{part}@redis.example.internal:6380/0"
        assert where["LEEWAY_REDIS_PASSWORD"] == {"secretKeyRef": {"name": "leeway-redis", "key": part}}
        assert where["SSL_CERT_FILE"] == "/etc/leeway/redis-ca/ca.crt"


def test_no_secret_in_the_manifests() -> None:
    for doc in render(redis__auth__existingSecret="mine"):
        assert doc["kind"] != "Secret"


def test_autoscalers_leave_the_number_alone() -> None:
    keda = render(CPU, sampler__autoscaling__enabled=True, namespace="rl")
    assert "replicas" not in workloads(keda)["sampler"]["spec"]
    scaled = pick(keda, "ScaledObject")["spec"]
    assert scaled["minReplicaCount"] == 1
    trigger = scaled["triggers"][0]
    assert trigger["type"] == "redis-streams"
    assert trigger["metadata"] == {
        "username": "leeway-controller",
        "address": "demo-leeway-redis.rl:6379",
        "stream": "leeway:{rl.demo}:tickets",
        "streamLength": "256",
    }
    secret = pick(keda, "TriggerAuthentication")["spec"]["secretTargetRef"][0]
    assert secret == {"parameter": "password", "name": "demo-leeway-redis", "key": "controller-password"}
    hpa = render(
        sampler__autoscaling__enabled=True,
        sampler__autoscaling__kind="hpa",
        sampler__autoscaling__hpa__metrics=[HPA_METRIC],
    )
    assert "replicas" not in workloads(hpa)["sampler"]["spec"]
    target = pick(hpa, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "demo-leeway-sampler")


def test_the_streams_name_is_the_one_that_leeway_uses() -> None:
    from leeway.streams import Keys

    docs = render(CPU, sampler__autoscaling__enabled=True, namespace="rl")
    stream = pick(docs, "ScaledObject")["spec"]["triggers"][0]["metadata"]["stream"]
    assert stream == Keys(environment(workloads(docs)["sampler"])["LEEWAY_RUN"]).tickets


def test_budgets_never_block_a_drain() -> None:
    for part in ("sampler", "trainer", "controller"):
        assert pick(render(), "PodDisruptionBudget", part)["spec"]["maxUnavailable"] == 1


def test_only_the_runs_pods_reach_redis() -> None:
    docs = render(CHART / "examples" / "autoscaled.yaml")
    rule = pick(docs, "NetworkPolicy", "-redis")["spec"]["ingress"][0]
    label = "app.kubernetes.io/component"
    parts = [f["podSelector"]["matchLabels"][label] for f in rule["from"] if "podSelector" in f]
    assert parts == ["sampler", "trainer", "controller", "test"]
    assert rule["ports"] == [{"port": "redis", "protocol": "TCP"}]


def test_monitors_find_the_metrics_port() -> None:
    pods = pick(render(telemetry__podMonitor__enabled=True), "PodMonitor")["spec"]
    assert pods["podMetricsEndpoints"] == [{"port": "metrics", "path": "/metrics", "interval": "30s"}]
    docs = render(telemetry__serviceMonitor__enabled=True)
    wanted = pick(docs, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    services = [
        d for d in docs if d["kind"] == "Service" and wanted.items() <= d["metadata"]["labels"].items()
    ]
    assert len(services) == 3 and all(s["spec"]["ports"][0]["name"] == "metrics" for s in services)


def test_spread_constraints_get_the_components_selector() -> None:
    docs = render(CHART / "examples" / "autoscaled.yaml")
    constraint = pod_of(workloads(docs)["sampler"])["topologySpreadConstraints"][0]
    assert constraint["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "sampler"


def test_names_of_two_long_releases_differ() -> None:
    one = workloads(render(CPU, name="a-release-name-that-is-as-long-as-helm-allows-it-53-a"))
    two = workloads(render(CPU, name="a-release-name-that-is-as-long-as-helm-allows-it-53-b"))
    assert one["sampler"]["metadata"]["name"] != two["sampler"]["metadata"]["name"]


@pytest.mark.parametrize("file", [None, *EXAMPLES], ids=lambda f: f.stem if f else "default")
def test_the_rendered_run_is_one_that_leeway_accepts(file: Path | None, tmp_path: Path) -> None:
    docs = render(*([file] if file else []))
    path = tmp_path / "run.yaml"
    path.write_text(pick(docs, "ConfigMap", "-run")["data"]["run.yaml"])
    config = load_config(path, environ={})
    assert config.sampler.http_port == 8080 and config.sampler.http_host == "0.0.0.0"


def test_numbers_reach_the_run_as_they_were_written(tmp_path: Path) -> None:
    """Helm holds every number as a float; 1048576 must not become 1.048576e+06."""
    sets = {"run__weights__chunk_bytes": 1 << 20, "run__trainer__learning_rate": 3e-7, "run__seed": 2**31 - 1}
    path = tmp_path / "run.yaml"
    for binary in ("helm", "helm3"):
        path.write_text(pick(render(CPU, binary=binary, **sets), "ConfigMap", "-run")["data"]["run.yaml"])
        config = load_config(path, environ={})
        assert (config.weights.chunk_bytes, config.seed) == (1 << 20, 2**31 - 1)
        assert config.trainer.learning_rate == 3e-7
