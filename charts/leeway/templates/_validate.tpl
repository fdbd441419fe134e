{{/* Checks that the schema cannot express. Each message names the key. */}}
{{- define "leeway.validate" -}}
{{- $external := .Values.externalRedis -}}
{{- if and .Values.redis.enabled $external.host -}}
{{- fail (printf "externalRedis.host is %q while redis.enabled is true: a run has one Redis; set redis.enabled=false to use the external one" $external.host) -}}
{{- end -}}
{{- if not .Values.redis.enabled -}}
{{- if not $external.host -}}
{{- fail "externalRedis.host is empty while redis.enabled is false: name the server, or set redis.enabled=true" -}}
{{- end -}}
{{- if not $external.existingSecret -}}
{{- fail (printf "externalRedis.existingSecret is empty: name a secret that holds the password of %s; servers without a password are not supported" $external.host) -}}
{{- end -}}
{{- end -}}
{{- $trainer := .Values.trainer -}}
{{- $claim := $trainer.persistence -}}
{{- if and (gt (int $trainer.replicas) 1) $claim.enabled (not $claim.existingClaim) (not (has "ReadWriteMany" $claim.accessModes)) -}}
{{- fail (printf "trainer.persistence.accessModes is %v: trainer.replicas=%d pods write one shared checkpoint and need ReadWriteMany" $claim.accessModes (int $trainer.replicas)) -}}
{{- end -}}
{{- if and (gt (int $trainer.replicas) 1) (not $claim.enabled) (not $claim.existingClaim) -}}
{{- fail (printf "trainer.persistence.enabled is false: trainer.replicas=%d pods write one shared checkpoint and need a shared volume" (int $trainer.replicas)) -}}
{{- end -}}
{{- $run := include "leeway.config" . | fromYaml -}}
{{- $drain := dig "sampler" "drain_s" 20 $run -}}
{{- if lt (int .Values.sampler.terminationGracePeriodSeconds) (add 30 (int (ceil $drain)) | int) -}}
{{- fail (printf "sampler.terminationGracePeriodSeconds=%d is too short: run.sampler.drain_s=%v plus 30 seconds to return unfinished tickets requires %d" (int .Values.sampler.terminationGracePeriodSeconds) $drain (add 30 (int (ceil $drain)))) -}}
{{- end -}}
{{- $tensor := dig "sampler" "tensor_parallel_size" 1 $run -}}
{{- if and (gt (int .Values.sampler.gpus) 0) (gt (int $tensor) (int .Values.sampler.gpus)) -}}
{{- fail (printf "run.sampler.tensor_parallel_size=%v exceeds sampler.gpus=%d" $tensor (int .Values.sampler.gpus)) -}}
{{- end -}}
{{- $scaler := .Values.sampler.autoscaling -}}
{{- if and $scaler.enabled (gt (int $scaler.minReplicas) (int $scaler.maxReplicas)) -}}
{{- fail (printf "sampler.autoscaling.minReplicas=%d is above maxReplicas=%d" (int $scaler.minReplicas) (int $scaler.maxReplicas)) -}}
{{- end -}}
{{- if and $scaler.enabled (eq $scaler.kind "hpa") (not $scaler.hpa.metrics) -}}
{{- fail "sampler.autoscaling.hpa.metrics is empty: kind hpa needs a metric to scale on; CPU usage says nothing about samplers on GPUs" -}}
{{- end -}}
{{- if and .Values.telemetry.podMonitor.enabled .Values.telemetry.serviceMonitor.enabled -}}
{{- fail "telemetry.podMonitor.enabled and telemetry.serviceMonitor.enabled are both true: every pod would be scraped twice; enable one of them" -}}
{{- end -}}
{{- $limit := dig "limits" "memory" "" .Values.redis.resources -}}
{{- if and .Values.redis.enabled $limit -}}
{{- $number := regexFind "^[0-9]+" $limit | int -}}
{{- $mebibytes := dict "Mi" $number "Gi" (mul 1024 $number) "Ti" (mul 1048576 $number) "M" (div (mul $number 1000000) 1048576) "G" (div (mul $number 1000000000) 1048576) -}}
{{- $have := get $mebibytes (regexFind "[A-Za-z]+$" $limit) -}}
{{- if and $have (lt (int $have) (div (mul 5 (int .Values.redis.maxmemoryMiB)) 4 | int)) -}}
{{- fail (printf "redis.resources.limits.memory=%s is too low for redis.maxmemoryMiB=%d: rewriting the append-only file needs at least 1.25 times that, preferably 1.5 times" $limit (int .Values.redis.maxmemoryMiB)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.data.existingClaim .Values.data.configMap -}}
{{- fail "data.existingClaim and data.configMap are both set, but only one volume can be mounted at /data; remove one of them" -}}
{{- end -}}
{{- end }}
