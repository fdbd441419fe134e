"""Values that cannot work are refused with the key that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from .chart_support import CHART, refusal

EXTERNAL = {"redis__enabled": False, "externalRedis__host": "redis.example"}
TASK = {"kind": "digits"}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "misspelt at the top": ({"sampelr": {}}, ["sampelr"]),
    "misspelt in a component": ({"sampler__gpu": 1}, ["sampler", "gpu"]),
    "misspelt deep down": ({"sampler__autoscaling__keda__tickets": 1}, ["sampler", "keda", "tickets"]),
    "misspelt in a toleration": ({"trainer__tolerations": [{"kye": "a"}]}, ["trainer", "tolerations", "kye"]),
    "misspelt in resources": ({"redis__resources": {"limit": {}}}, ["redis", "resources", "limit"]),
    "misspelt in a security context": (
        {"sampler__securityContext__runAsNonroot": True},
        ["sampler", "securityContext", "runAsNonroot"],
    ),
    "misspelt in affinity": (
        {"sampler__affinity": {"podAffinity": {"required": []}}},
        ["affinity", "podAffinity", "required"],
    ),
    "misspelt section of the run": ({"run": {"task": TASK, "snyc": {}}}, ["run", "snyc"]),
    "misspelt key of the run": (
        {"run": {"task": TASK, "sync": {"max_agee": 1}}},
        ["run", "sync", "max_agee"],
    ),
    "a run without a task": ({"run": {"seed": 1}}, ["run", "task"]),
    "wrong type": ({"sampler__replicas": "two"}, ["sampler", "replicas"]),
    "wrong type in the run": (
        {"run": {"task": TASK, "trainer": {"steps": "many"}}},
        ["run", "trainer", "steps"],
    ),
    "out of range": ({"run": {"task": TASK, "sync": {"ess_threshold": 2}}}, ["ess_threshold"]),
    "not a size": ({"trainer__persistence__size": "big"}, ["persistence", "size"]),
    "a size of another notation": (
        {"trainer__resources": {"limits": {"memory": "8GB"}}},
        ["trainer", "resources", "memory"],
    ),
    "fewer than no processors": ({"trainer__resources": {"limits": {"cpu": -1}}}, ["trainer", "cpu"]),
    "a repository with a tag": (
        {"sampler__image__repository": "my/leeway:1.0"},
        ["sampler", "image", "repository"],
    ),
    "a registry with a scheme": ({"global__imageRegistry": "https://a.example"}, ["global", "imageRegistry"]),
    "a tag that is a number": ({"sampler__image__tag": 1.10}, ["sampler", "image", "tag", "string"]),
    "a name that Kubernetes refuses": ({"fullnameOverride": "My_Run"}, ["fullnameOverride"]),
    "a label with a space": ({"sampler__podLabels": {"team": "a b"}}, ["sampler", "podLabels", "team"]),
    "text in place of resources": ({"sampler__resources": "cpu=1"}, ["sampler", "resources", "object"]),
    "text in place of a run": ({"run": "task: {kind: digits}"}, ["run", "object"]),
    "a digest that is none": ({"sampler__image__digest": "abc"}, ["image", "digest"]),
    "what the chart sets itself": (
        {"run": {"task": TASK, "sampler": {"replicas": 2}}},
        ["run", "sampler", "replicas"],
    ),
    "both kinds of Redis": (
        {"externalRedis__host": "redis.example"},
        ["externalRedis.host", "redis.enabled"],
    ),
    "no Redis": ({"redis__enabled": False}, ["externalRedis.host"]),
    "no secret": (EXTERNAL, ["externalRedis.existingSecret"]),
    "a drain that is cut off": (
        {"run": {"task": TASK, "sampler": {"drain_s": 100}}},
        ["sampler.terminationGracePeriodSeconds", "run.sampler.drain_s"],
    ),
    "pods that share no volume": ({"trainer__replicas": 2}, ["trainer.persistence.accessModes"]),
    "more than the GPUs": (
        {"run": {"task": TASK, "sampler": {"tensor_parallel_size": 4}}},
        ["run.sampler.tensor_parallel_size", "sampler.gpus"],
    ),
    "an autoscaler without a metric": (
        {"sampler__autoscaling__enabled": True, "sampler__autoscaling__kind": "hpa"},
        ["sampler.autoscaling.hpa.metrics"],
    ),
    "two monitors": (
        {"telemetry__podMonitor__enabled": True, "telemetry__serviceMonitor__enabled": True},
        ["telemetry.podMonitor", "telemetry.serviceMonitor"],
    ),
    "a server smaller than its data": (
        {"redis__resources": {"limits": {"memory": "2Gi"}}},
        ["redis.resources.limits.memory", "redis.maxmemoryMiB"],
    ),
}


@pytest.mark.parametrize("binary", ["helm", "helm3"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_its_key(binary: str, case: str) -> None:
    sets, words = REFUSED[case]
    said = refusal(binary, **sets)
    for word in words:
        assert word in said, said


def test_refused_in_a_values_file(tmp_path: Any) -> None:
    file = tmp_path / "values.yaml"
    file.write_text((CHART / "examples" / "cpu.yaml").read_text().replace("shmSize", "shmsize"))
    assert "shmsize" in refusal("helm", file)
