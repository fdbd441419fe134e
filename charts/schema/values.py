"""The chart's values: the model from which values.yaml, values.schema.json and the README are generated.

Objects that are copied into manifests unchanged are declared with their Kubernetes type, so that misspelled
keys in them are rejected too.
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
QUANTITY = r"^[0-9.]+([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$"
"""An amount as Kubernetes writes it: 500m, 8Gi; not 8GB."""
Quantity = Annotated[str, Field(pattern=QUANTITY)]
Name = Annotated[str, Field(pattern=r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$")]
"""What names of Kubernetes objects consist of."""
Registry = Annotated[str, Field(pattern=r"^([A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*)?$")]
Repository = Annotated[str, Field(pattern=r"^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*$")]
Tag = Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$")]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]
Labels = dict[str, LabelValue]
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

    registry: Registry = ""
    """Defaults to `global.imageRegistry`."""
    repository: Repository = ""
    """Without a tag."""
    tag: Tag = ""
    """Defaults to the chart's appVersion with the suffix `-cuda` for pods with GPUs, or `-cpu`."""
    digest: str = Field(default="", pattern=r"^(sha256:[0-9a-f]{64})?$")
    """Takes precedence over the tag."""
    pullPolicy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"


class ServiceAccount(Values):
    """The service account of the pods. Only the controller's pods mount its token."""

    create: bool = True
    name: str = ""
    """Defaults to a name derived from the release, or to `default` if `create` is false."""
    annotations: Text = {}


class Component(Values):
    """Settings that all components have."""

    image: Image = Image(repository="leeway")
    imagePullSecrets: PullSecrets = []
    """Added to `global.imagePullSecrets`."""
    serviceAccount: ServiceAccount = ServiceAccount()
    resources: Resources = {}
    """Do not list GPUs here: use `gpus`."""
    nodeSelector: Labels = {}
    tolerations: Tolerations = []
    affinity: Affinity = {}
    topologySpreadConstraints: Spread = []
    """A constraint without a labelSelector selects the component's pods."""
    priorityClassName: str = ""
    schedulerName: str = ""
    runtimeClassName: str = ""
    podSecurityContext: PodSecurity = POD_SECURITY
    securityContext: Security = SECURITY
    extraEnv: Env = []
    """Additional environment variables, for example `OTEL_*` and `HF_*`."""
    extraEnvFrom: EnvFrom = []
    extraVolumes: Volumes = []
    extraVolumeMounts: Mounts = []
    extraArgs: list[str] = []
    """Appended to the command's arguments."""
    annotations: Text = {}
    """Annotations of the Deployment or StatefulSet."""
    labels: Labels = {}
    """Labels of the Deployment or StatefulSet, for example `kueue.x-k8s.io/queue-name`."""
    podAnnotations: Text = {}
    podLabels: Labels = {}
    terminationGracePeriodSeconds: int = Field(default=30, ge=1)


class Budget(Values):
    """A PodDisruptionBudget. By default, one pod at a time may be evicted."""

    enabled: bool = True
    maxUnavailable: int | str = 1


class Hpa(Values):
    """A HorizontalPodAutoscaler."""

    metrics: Metrics = []
    """Metrics to scale on (autoscaling/v2). Required for kind hpa: CPU usage says little about samplers."""
    behavior: Behavior = {}


class Keda(Values):
    """A KEDA ScaledObject on the length of the ticket stream: tickets that are queued or in progress.

    The consumer group's lag cannot be used: answered tickets are deleted, and Redis cannot compute the lag
    after deletions.
    """

    ticketsPerSampler: int | None = Field(default=None, ge=1)
    """Target number of tickets per sampler. Defaults to `run.sampler.max_num_seqs`."""
    pollingInterval: int = Field(default=15, ge=1)
    cooldownPeriod: int = Field(default=300, ge=0)


class Autoscaling(Values):
    """Autoscaling of samplers. When enabled, the Deployment does not set `replicas`."""

    enabled: bool = False
    kind: Literal["keda", "hpa"] = "keda"
    minReplicas: int = Field(default=1, ge=1)
    maxReplicas: int = Field(default=8, ge=1)
    hpa: Hpa = Hpa()
    keda: Keda = Keda()


class Sampler(Component):
    """The vLLM samplers, a Deployment."""

    replicas: int = Field(default=2, ge=0)
    gpus: int = Field(default=1, ge=0)
    """GPUs per pod; 0 for a CPU pod. Also vLLM's tensor_parallel_size, unless `run` sets it."""
    image: Image = Image(repository="leeway-sampler")
    shmSize: Quantity = "8Gi"
    """Size of /dev/shm. It counts against the memory limit."""
    maxUnavailable: int | str = 1
    maxSurge: int | str = 0
    """With 0, an upgrade does not need a spare GPU."""
    startupSeconds: int = Field(default=2700, ge=60)
    """Maximum time for loading the model and compiling, in seconds."""
    terminationGracePeriodSeconds: int = Field(default=90, ge=1)
    """Must exceed `run.sampler.drain_s` (default 20) by at least 30."""
    podDisruptionBudget: Budget = Budget()
    autoscaling: Autoscaling = Autoscaling()


class Claim(Values):
    """A PersistentVolumeClaim."""

    enabled: bool = True
    existingClaim: str = ""
    storageClass: str = ""
    """Defaults to the cluster's default storage class."""
    accessModes: list[AccessMode] = Field(default=["ReadWriteOnce"], min_length=1)
    size: Quantity = "200Gi"
    keep: bool = True
    """Keep the claim when the release is uninstalled."""
    annotations: Text = {}


class Trainer(Component):
    """The DeepSpeed trainer, a StatefulSet. Its pods form a group of `replicas` x `processesPerPod` ranks."""

    replicas: int = Field(default=1, ge=1)
    """Number of pods. With more than one, `persistence.accessModes` must include ReadWriteMany."""
    gpus: int = Field(default=1, ge=0)
    """GPUs per pod; 0 for a CPU pod."""
    processesPerPod: int | None = Field(default=None, ge=1)
    """Defaults to one process per GPU, or one process without GPUs."""
    image: Image = Image(repository="leeway-trainer")
    shmSize: Quantity = "8Gi"
    """Size of /dev/shm, which NCCL uses. It counts against the memory limit."""
    rendezvousPort: int = Field(default=29400, ge=1, le=65535)
    startupSeconds: int = Field(default=2700, ge=60)
    terminationGracePeriodSeconds: int = Field(default=120, ge=1)
    persistence: Claim = Claim()
    """Volume for checkpoints and the final model. Without it, losing a pod restarts the run."""
    podDisruptionBudget: Budget = Budget()


class Controller(Component):
    """The controller, a Deployment: plans batches, decides on resyncs. A Lease elects one of two replicas."""

    replicas: int = Field(default=1, ge=1)
    image: Image = Image(repository="leeway-controller")
    resources: Resources = {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
    podDisruptionBudget: Budget = Budget()
    leaseSeconds: int = Field(default=15, ge=5)
    """How long a leader that does not renew its Lease keeps it, in seconds."""


class ServicePasswords(Values):
    """Keys of the passwords of the services' users."""

    controller: str = Field(default="controller-password", min_length=1)
    trainer: str = Field(default="trainer-password", min_length=1)
    sampler: str = Field(default="sampler-password", min_length=1)


class Password(Values):
    """Passwords of the bundled server: of its administrator, and of a user per service."""

    existingSecret: str = ""
    """If empty, passwords are generated at installation and kept; `helm template` cannot keep them. Otherwise
    a secret with the keys below."""
    key: str = "redis-password"
    """Key of the administrator's password, which no pod of the run has."""
    services: ServicePasswords = ServicePasswords()


class Redis(Component):
    """The bundled Redis: one node with a password and an append-only file, without eviction."""

    enabled: bool = True
    """Set to false to use `externalRedis`."""
    image: Image = Image(registry="docker.io", repository="library/redis", tag="7.2-bookworm")
    auth: Password = Password()
    maxmemoryMiB: int = Field(default=4096, ge=64)
    """Redis rejects writes beyond this. The pod's memory limit is 1.5 times this unless set."""
    persistence: Claim = Claim(size="20Gi", keep=False)
    podSecurityContext: PodSecurity = {**POD_SECURITY, "runAsUser": 999, "runAsGroup": 999, "fsGroup": 999}


class SecretKey(Values):
    """A key of a Secret."""

    secret: str = ""
    key: str = ""


class RedisUser(Values):
    """The Redis user of a service; see `leeway redis acl`."""

    username: str = ""
    """Defaults to the server's default user."""
    passwordKey: str = Field(default="redis-password", min_length=1)
    """Key of `externalRedis.existingSecret`."""


class Users(Values):
    """One Redis user per service."""

    controller: RedisUser = RedisUser()
    trainer: RedisUser = RedisUser()
    sampler: RedisUser = RedisUser()


class Tls(Values):
    """TLS for connections to the external server."""

    enabled: bool = False
    ca: SecretKey = SecretKey(key="ca.crt")
    """Secret with the certificate of a private certificate authority."""


class ExternalRedis(Values):
    """An existing server: Redis 7 or Valkey with `maxmemory-policy noeviction`."""

    host: str = ""
    port: int = Field(default=6379, ge=1, le=65535)
    database: int = Field(default=0, ge=0)
    existingSecret: str = ""
    """Secret that holds the passwords."""
    users: Users = Users()
    tls: Tls = Tls()


class ModelCache(Claim):
    """Volume for downloaded models. Without it, every pod downloads its own copy."""

    enabled: bool = False
    accessModes: list[AccessMode] = Field(default=["ReadWriteMany"], min_length=1)


class Data(Values):
    """Tasks, models and reward code, mounted read-only at /data in the run's pods and added to PYTHONPATH."""

    existingClaim: str = ""
    configMap: str = ""


class HuggingFace(Values):
    """Hugging Face token, for gated models."""

    token: SecretKey = SecretKey(key="token")


class Otlp(Values):
    """Export of traces."""

    endpoint: str = ""
    """For example http://otel-collector.monitoring:4317. If empty, traces are not exported."""
    protocol: Literal["grpc", "http/protobuf"] = "grpc"
    headers: SecretKey = SecretKey(key="headers")
    """Secret that holds the value of OTEL_EXPORTER_OTLP_HEADERS."""


class Monitor(Values):
    """A PodMonitor or ServiceMonitor of the Prometheus operator."""

    enabled: bool = False
    interval: str = "30s"
    labels: Labels = {}


class Telemetry(Values):
    """Metrics and traces."""

    metricsPort: int = Field(default=9464, ge=1, le=65535)
    otlp: Otlp = Otlp()
    podMonitor: Monitor = Monitor()
    serviceMonitor: Monitor = Monitor()


class NetworkPolicy(Values):
    """Restricts incoming connections to the pods. Outgoing connections are not restricted."""

    enabled: bool = False
    metricsFrom: Peers = [{"namespaceSelector": {}}]
    """Peers that may scrape metrics."""
    redisFrom: Peers = []
    """Additional peers that may connect to the bundled Redis, for example KEDA."""
    extraIngress: Ingress = []
    """Additional rules for samplers, trainer and controller."""


class Global(Values):
    """Settings for all components."""

    imageRegistry: Registry = ""
    imagePullSecrets: PullSecrets = []
    gpuResource: str = Field(default="nvidia.com/gpu", min_length=1)


class ChartValues(Values):
    """All values."""

    nameOverride: Name = ""
    fullnameOverride: Name = Field(default="", max_length=40)
    """Maximum 40 characters."""
    runId: str = ""
    """Name of the run in Redis. Defaults to NAMESPACE.RELEASE."""
    run: dict[str, Any] = {}
    """The run's configuration (docs/configuration.md), without the keys that the chart sets itself."""
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
    "telemetry": {
        "metrics_host": "the chart",
        "metrics_port": "telemetry.metricsPort",
        "otlp_endpoint": "telemetry.otlp.endpoint",
    },
    "output": {"dir": "trainer.persistence"},
}
"""Keys of RunConfig that the chart sets itself, and what to use instead."""
