"""The chart's values: one model from which values.yaml, values.schema.json and the README are written.

Objects that go into manifests as they are carry the name of their Kubernetes type, so that a misspelt key
in them is refused as well.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Values(BaseModel):
    """Base of all levels."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def kubernetes(name: str, *, many: bool = False) -> Any:
    """A field whose value is the Kubernetes type `name` (core/v1 unless it has dots), or a list of them."""
    return Field(
        json_schema_extra={"k8s": name if "." in name else f"io.k8s.api.core.v1.{name}", "many": many}
    )


Resources = Annotated[dict[str, Any], kubernetes("ResourceRequirements")]
Affinity = Annotated[dict[str, Any], kubernetes("Affinity")]
Tolerations = Annotated[list[Any], kubernetes("Toleration", many=True)]
Spread = Annotated[list[Any], kubernetes("TopologySpreadConstraint", many=True)]
PodSecurity = Annotated[dict[str, Any], kubernetes("PodSecurityContext")]
Security = Annotated[dict[str, Any], kubernetes("SecurityContext")]
Env = Annotated[list[Any], kubernetes("EnvVar", many=True)]
EnvFrom = Annotated[list[Any], kubernetes("EnvFromSource", many=True)]
Volumes = Annotated[list[Any], kubernetes("Volume", many=True)]
Mounts = Annotated[list[Any], kubernetes("VolumeMount", many=True)]
PullSecrets = Annotated[list[Any], kubernetes("LocalObjectReference", many=True)]
Peers = Annotated[list[Any], kubernetes("io.k8s.api.networking.v1.NetworkPolicyPeer", many=True)]
Ingress = Annotated[list[Any], kubernetes("io.k8s.api.networking.v1.NetworkPolicyIngressRule", many=True)]
Metrics = Annotated[list[Any], kubernetes("io.k8s.api.autoscaling.v2.MetricSpec", many=True)]
Behavior = Annotated[dict[str, Any], kubernetes("io.k8s.api.autoscaling.v2.HorizontalPodAutoscalerBehavior")]
Text = dict[str, str]
Quantity = Annotated[str, Field(pattern=r"^[0-9.]+([numkKMGTPE]i?)?$")]
AccessMode = Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]
POD_SECURITY = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"}}  # fmt: skip
SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


class Image(Values):
    """A container image."""

    registry: str = ""
    """Empty: `global.imageRegistry`."""
    repository: str = Field(default="", min_length=1)
    tag: str = ""
    """Empty: the chart's appVersion, with `-cuda` for pods with GPUs and `-cpu` for others."""
    digest: str = Field(default="", pattern=r"^(sha256:[0-9a-f]{64})?$")
    """Stands above the tag."""
    pullPolicy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"


class ServiceAccount(Values):
    """The pods' identity. Only the controller's pods get a token."""

    create: bool = True
    name: str = ""
    """Empty: made from the release's name, or `default` when none is created."""
    annotations: Text = {}


class Component(Values):
    """What every component's pods can be told."""

    image: Image = Image(repository="leeway")
    imagePullSecrets: PullSecrets = []
    """Added to `global.imagePullSecrets`."""
    serviceAccount: ServiceAccount = ServiceAccount()
    resources: Resources = {}
    """GPUs are added by `gpus`."""
    nodeSelector: Text = {}
    tolerations: Tolerations = []
    affinity: Affinity = {}
    topologySpreadConstraints: Spread = []
    """A constraint without a labelSelector gets the component's own."""
    priorityClassName: str = ""
    schedulerName: str = ""
    runtimeClassName: str = ""
    podSecurityContext: PodSecurity = POD_SECURITY
    securityContext: Security = SECURITY
    extraEnv: Env = []
    """Also the place for `OTEL_*` and `HF_*` variables."""
    extraEnvFrom: EnvFrom = []
    extraVolumes: Volumes = []
    extraVolumeMounts: Mounts = []
    extraArgs: list[str] = []
    """Put behind the command's own arguments."""
    annotations: Text = {}
    """Annotations of the Deployment or StatefulSet."""
    labels: Text = {}
    """Labels of the Deployment or StatefulSet, for example `kueue.x-k8s.io/queue-name`."""
    podAnnotations: Text = {}
    podLabels: Text = {}
    terminationGracePeriodSeconds: int = Field(default=30, ge=1)


class Budget(Values):
    """A PodDisruptionBudget; one pod at a time may be evicted."""

    enabled: bool = True
    maxUnavailable: int | str = 1


class Hpa(Values):
    """A HorizontalPodAutoscaler."""

    metrics: Metrics = []
    """What it scales on (autoscaling/v2). Required for kind hpa: CPU use says little about samplers."""
    behavior: Behavior = {}


class Keda(Values):
    """A KEDA ScaledObject on the length of the ticket stream: what waits and what is in work.

    Not on the group's lag, which Redis cannot count once entries were deleted, as answered tickets are.
    """

    ticketsPerSampler: int | None = Field(default=None, ge=1)
    """null: `run.sampler.max_num_seqs`."""
    pollingInterval: int = Field(default=15, ge=1)
    cooldownPeriod: int = Field(default=300, ge=0)


class Autoscaling(Values):
    """Scales samplers; the Deployment then has no `replicas`."""

    enabled: bool = False
    kind: Literal["keda", "hpa"] = "keda"
    minReplicas: int = Field(default=1, ge=1)
    maxReplicas: int = Field(default=8, ge=1)
    hpa: Hpa = Hpa()
    keda: Keda = Keda()


class Sampler(Component):
    """vLLM samplers: a Deployment."""

    replicas: int = Field(default=2, ge=0)
    gpus: int = Field(default=1, ge=0)
    """GPUs per pod; 0: a CPU pod. Also vLLM's tensor_parallel_size unless `run` gives one."""
    image: Image = Image(repository="leeway-sampler")
    shmSize: Quantity = "8Gi"
    """/dev/shm; it counts against the memory limit."""
    maxUnavailable: int | str = 1
    maxSurge: int | str = 0
    """0: an upgrade needs no spare GPU."""
    startupSeconds: int = Field(default=2700, ge=60)
    """How long loading the model and compiling may take."""
    terminationGracePeriodSeconds: int = Field(default=90, ge=1)
    """Must be longer than `run.sampler.drain_s` (20 unless it is given) by at least 30."""
    podDisruptionBudget: Budget = Budget()
    autoscaling: Autoscaling = Autoscaling()


class Claim(Values):
    """A PersistentVolumeClaim."""

    enabled: bool = True
    existingClaim: str = ""
    storageClass: str = ""
    """Empty: the cluster's default."""
    accessModes: list[AccessMode] = Field(default=["ReadWriteOnce"], min_length=1)
    size: Quantity = "200Gi"
    keep: bool = True
    """Leave it when the release is uninstalled."""
    annotations: Text = {}


class Trainer(Component):
    """DeepSpeed: a StatefulSet. Its pods make one group of `replicas` x `processesPerPod` ranks."""

    replicas: int = Field(default=1, ge=1)
    """Pods; with more than one, `persistence.accessModes` must have ReadWriteMany."""
    gpus: int = Field(default=1, ge=0)
    """GPUs per pod; 0: a CPU pod."""
    processesPerPod: int | None = Field(default=None, ge=1)
    """null: one per GPU, one without GPUs."""
    image: Image = Image(repository="leeway-trainer")
    shmSize: Quantity = "8Gi"
    """/dev/shm, which NCCL uses; it counts against the memory limit."""
    rendezvousPort: int = Field(default=29400, ge=1, le=65535)
    startupSeconds: int = Field(default=2700, ge=60)
    terminationGracePeriodSeconds: int = Field(default=120, ge=1)
    persistence: Claim = Claim()
    """Checkpoints and the final model. Without it a lost pod starts the run over."""
    podDisruptionBudget: Budget = Budget()


class Controller(Component):
    """Plans batches and decides resyncs: a Deployment. With two replicas one leads, by a Lease."""

    replicas: int = Field(default=1, ge=1)
    image: Image = Image(repository="leeway-controller")
    resources: Resources = {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
    podDisruptionBudget: Budget = Budget()
    leaseSeconds: int = Field(default=15, ge=5)
    """How long a leader that is silent keeps its place."""


class Password(Values):
    """The bundled server's password."""

    existingSecret: str = ""
    """Empty: one is generated at install and kept. `helm template` cannot keep one: name a secret there."""
    key: str = "redis-password"


class Redis(Component):
    """The bundled server: one node, password, append-only file, no eviction."""

    enabled: bool = True
    """false: use `externalRedis`."""
    image: Image = Image(registry="docker.io", repository="library/redis", tag="7.2-bookworm")
    auth: Password = Password()
    maxmemoryMiB: int = Field(default=4096, ge=64)
    """Redis refuses writes beyond; the pod's memory limit is 1.5 times this unless `resources` has one."""
    persistence: Claim = Claim(size="20Gi", keep=False)
    podSecurityContext: PodSecurity = {**POD_SECURITY, "runAsUser": 999, "runAsGroup": 999, "fsGroup": 999}


class SecretKey(Values):
    """A key of a secret."""

    secret: str = ""
    key: str = ""


class RedisUser(Values):
    """A service's user, see `leeway redis acl`."""

    username: str = ""
    """Empty: the server's default user."""
    passwordKey: str = Field(default="redis-password", min_length=1)
    """Key of `externalRedis.existingSecret`."""


class Users(Values):
    """Users per service."""

    controller: RedisUser = RedisUser()
    trainer: RedisUser = RedisUser()
    sampler: RedisUser = RedisUser()


class Tls(Values):
    """TLS to the external server."""

    enabled: bool = False
    ca: SecretKey = SecretKey(key="ca.crt")
    """A certificate authority of your own."""


class ExternalRedis(Values):
    """A server that exists: Redis 7 or Valkey, `noeviction`."""

    host: str = ""
    port: int = Field(default=6379, ge=1, le=65535)
    database: int = Field(default=0, ge=0)
    existingSecret: str = ""
    """Secret with the passwords."""
    users: Users = Users()
    tls: Tls = Tls()


class ModelCache(Claim):
    """Where models are fetched to. Without a claim every pod fetches its own."""

    enabled: bool = False
    accessModes: list[AccessMode] = Field(default=["ReadWriteMany"], min_length=1)


class Data(Values):
    """Mounted read-only at /data by the run's pods and part of PYTHONPATH: tasks, models, reward code."""

    existingClaim: str = ""
    configMap: str = ""


class HuggingFace(Values):
    """Access to gated models."""

    token: SecretKey = SecretKey(key="token")


class Otlp(Values):
    """Traces."""

    endpoint: str = ""
    """For example http://otel-collector.monitoring:4317; empty: none."""
    protocol: Literal["grpc", "http/protobuf"] = "grpc"
    headers: SecretKey = SecretKey(key="headers")
    """Secret with OTEL_EXPORTER_OTLP_HEADERS."""


class Monitor(Values):
    """A monitor of the Prometheus operator."""

    enabled: bool = False
    interval: str = "30s"
    labels: Text = {}


class Telemetry(Values):
    """Metrics and traces."""

    metricsPort: int = Field(default=9464, ge=1, le=65535)
    otlp: Otlp = Otlp()
    podMonitor: Monitor = Monitor()
    serviceMonitor: Monitor = Monitor()


class NetworkPolicy(Values):
    """Who may connect to the pods. Outgoing connections are not restricted."""

    enabled: bool = False
    metricsFrom: Peers = [{"namespaceSelector": {}}]
    """Who may scrape metrics."""
    redisFrom: Peers = []
    """Who else may reach the bundled Redis, for example KEDA."""
    extraIngress: Ingress = []
    """More rules for samplers, trainer and controller."""


class Global(Values):
    """For all components."""

    imageRegistry: str = ""
    imagePullSecrets: PullSecrets = []
    gpuResource: str = Field(default="nvidia.com/gpu", min_length=1)


class ChartValues(Values):
    """All values."""

    nameOverride: str = ""
    fullnameOverride: str = Field(default="", max_length=40)
    """At most 40 characters."""
    runId: str = ""
    """Name of the run in Redis; empty: namespace and release."""
    run: dict[str, Any] = {}
    """The run's configuration, see docs/configuration.md, without what the chart sets itself."""
    sampler: Sampler = Sampler()
    trainer: Trainer = Trainer()
    controller: Controller = Controller()
    redis: Redis = Redis(
        resources={"requests": {"cpu": "500m"}},
        terminationGracePeriodSeconds=60,
    )
    externalRedis: ExternalRedis = ExternalRedis()
    modelCache: ModelCache = ModelCache()
    data: Data = Data()
    huggingFace: HuggingFace = HuggingFace()
    telemetry: Telemetry = Telemetry()
    networkPolicy: NetworkPolicy = NetworkPolicy()
    global_: Global = Field(default=Global(), alias="global")


RUN = {
    "name": "gcd",
    "model": {"name": "Qwen/Qwen3-0.6B", "max_length": 1024},
    "task": {"kind": "reasoning_gym", "name": "gcd", "reward": "verifier"},
    "sampling": {"max_new_tokens": 256},
    "batch": {"prompts": 32, "group_size": 8},
    "correction": {"method": "dlc"},
    "sync": {"ess_threshold": 0.5, "max_age": 16, "max_lead": 1},
    "trainer": {"steps": 200, "learning_rate": 1e-6},
}
OWNED = {
    "sampler": {
        "replicas": "sampler.replicas",
        "http_host": "the chart",
        "http_port": "the chart",
        "max_restarts": "Kubernetes",
        "start_timeout_s": "sampler.startupSeconds",
    },
    "trainer": {"ranks": "trainer.replicas and trainer.processesPerPod", "max_restarts": "Kubernetes"},
    "redis": {
        "url": "redis or externalRedis",
        "service_urls": "externalRedis.users",
        "maxmemory_mib": "redis.maxmemoryMiB",
        "appendonly": "the chart",
    },
    "telemetry": {"metrics_port": "telemetry.metricsPort", "otlp_endpoint": "telemetry.otlp.endpoint"},
    "output": {"dir": "trainer.persistence"},
}
"""Keys of RunConfig that the chart sets itself, and what to use in their place."""
