"""Every combination renders with both Helm versions to what Kubernetes accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from .chart_support import CHART, EXAMPLES, helm, render

CUSTOM_KINDS = {"PodMonitor", "ServiceMonitor", "ScaledObject", "TriggerAuthentication"}
"""Kinds of operators, for which Kubernetes has no schema; test_golden.py looks at them."""
VERSIONS = ("1.25", "1.30", kubernetes_validate.latest_version())
HPA_METRIC = {
    "type": "External",
    "external": {"metric": {"name": "tickets"}, "target": {"type": "AverageValue", "averageValue": "64"}},
}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "long-name": {"name": "a-release-name-that-is-as-long-as-helm-allows-it-53-x"},
    "other-namespace": {"namespace": "other"},
    "hpa": {
        "sampler__autoscaling__enabled": True,
        "sampler__autoscaling__kind": "hpa",
        "sampler__autoscaling__hpa__metrics": [HPA_METRIC],
    },
    "keda": {"sampler__autoscaling__enabled": True},
    "network-policies": {"networkPolicy__enabled": True},
    "pod-monitor": {"telemetry__podMonitor__enabled": True},
    "service-monitor": {"telemetry__serviceMonitor__enabled": True},
    "otlp": {
        "telemetry__otlp__endpoint": "http://collector:4317",
        "telemetry__otlp__headers__secret": "otlp",
    },
    "no-budgets": {
        "sampler__podDisruptionBudget__enabled": False,
        "trainer__podDisruptionBudget__enabled": False,
        "controller__podDisruptionBudget__enabled": False,
    },
    "no-claims": {"trainer__persistence__enabled": False, "redis__persistence__enabled": False},
    "own-claims": {
        "trainer__persistence__existingClaim": "mine",
        "redis__persistence__existingClaim": "mine",
        "modelCache__existingClaim": "models",
        "data__existingClaim": "data",
    },
    "no-accounts": {
        f"{part}__serviceAccount__create": False for part in ("sampler", "trainer", "controller", "redis")
    },
    "two-trainers": {
        "trainer__replicas": 2,
        "trainer__gpus": 8,
        "trainer__persistence__accessModes": ["ReadWriteMany"],
        "controller__replicas": 2,
    },
    "own-secret": {"redis__auth__existingSecret": "redis", "huggingFace__token__secret": "hf"},
    "everything-per-pod": {
        f"{part}__{key}": value
        for part in ("sampler", "trainer", "controller", "redis")
        for key, value in {
            "nodeSelector": {"pool": "a"},
            "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
                        ]
                    }
                }
            },
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
            ],
            "priorityClassName": "high",
            "schedulerName": "own",
            "runtimeClassName": "nvidia",
            "imagePullSecrets": [{"name": "pull"}],
            "extraEnv": [{"name": "A", "value": "1"}],
            "extraEnvFrom": [{"secretRef": {"name": "env"}}],
            "extraVolumes": [{"name": "extra", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
            "extraArgs": ["--metrics-port=1"],
            "annotations": {"a": "b"},
            "labels": {"kueue.x-k8s.io/queue-name": "gpus"},
            "podAnnotations": {"a": "b"},
            "podLabels": {"a": "b"},
            "image.digest": "sha256:" + 64 * "0",
            "serviceAccount.annotations": {"iam": "role"},
            "resources": {"limits": {"cpu": "2", "memory": "64Gi"}},
        }.items()
    },
}


def files_of(case: str) -> tuple[list[Path], dict[str, Any]]:
    if case in CASES:
        return [], CASES[case]
    return [CHART / "examples" / f"{case}.yaml"], {}


ALL = [*CASES, *(path.stem for path in EXAMPLES)]


@pytest.mark.parametrize("case", ALL)
def test_renders_alike_and_valid(case: str) -> None:
    files, sets = files_of(case)
    docs = render(*files, **sets)
    older = render(*files, binary="helm3", **sets)
    secret = [d for d in (*docs, *older) if d["kind"] == "Secret"]
    for doc in secret:
        doc["data"] = dict.fromkeys(doc["data"], "")  # generated anew by each
    assert docs == older
    names = [(d["kind"], d["metadata"]["name"]) for d in docs]
    assert len(names) == len(set(names))
    assert all("namespace" not in d["metadata"] for d in docs)
    for kind, name in names:
        assert len(name) <= (52 if kind == "StatefulSet" else 63), name
    for doc in docs:
        if doc["kind"] in CUSTOM_KINDS:
            continue
        for version in VERSIONS:
            # Raises on a field that the version does not know, and on a kind without a schema.
            kubernetes_validate.validate(doc, version, strict=True)


@pytest.mark.parametrize("binary", ["helm", "helm3"])
@pytest.mark.parametrize("case", ["default", *(path.stem for path in EXAMPLES)])
def test_lint(binary: str, case: str) -> None:
    values = [] if case == "default" else ["-f", str(CHART / "examples" / f"{case}.yaml")]
    done = helm(binary, "lint", "--strict", str(CHART), *values)
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_helm_versions_are_meant() -> None:
    assert helm("helm", "version", "--short").stdout.startswith("v4.")
    assert helm("helm3", "version", "--short").stdout.startswith("v3.")
