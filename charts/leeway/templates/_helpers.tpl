{{/*
A key that is null, or that an older release does not have (--reuse-values), means its default. Helm deletes the
default of such a key, so that it is filled in again here. Every template starts with this. Objects of Kubernetes
types are filled in as a whole: a null within them removes a key.
*/}}
{{- define "leeway.defaults" -}}
{{- range $path, $default := .Files.Get "files/defaults.yaml" | fromYaml -}}
{{- $level := $.Values -}}
{{- $keys := splitList "." $path -}}
{{- range initial $keys -}}
{{- if not (kindIs "map" (index $level .)) -}}
{{- $_ := set $level . dict -}}
{{- end -}}
{{- $level = index $level . -}}
{{- end -}}
{{- if kindIs "invalid" (index $level (last $keys)) -}}
{{- $_ := set $level (last $keys) $default -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A name of at most 40 characters, so that what is put behind it stays within 52 (StatefulSet) and 63. */}}
{{- define "leeway.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- if gt (len $full) 40 -}}
{{- printf "%s-%s" (trunc 31 $full | trimSuffix "-") (sha256sum $full | trunc 8) -}}
{{- else -}}
{{- $full -}}
{{- end -}}
{{- end }}

{{/* Arguments of the helpers below: dict "root" $ "name" "sampler". */}}
{{- define "leeway.name" -}}
{{ include "leeway.fullname" .root }}-{{ .name }}
{{- end }}

{{- define "leeway.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "leeway.labels" -}}
{{ include "leeway.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: leeway
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Labels and annotations of the workload object itself. */}}
{{- define "leeway.metadata" -}}
{{- $own := index .root.Values .name -}}
name: {{ include "leeway.name" . }}
labels:
  {{- include "leeway.labels" . | nindent 2 }}
  {{- with $own.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $own.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "leeway.serviceAccount" -}}
{{- $account := (index .root.Values .name).serviceAccount -}}
{{- if $account.create -}}
{{ default (include "leeway.name" .) $account.name }}
{{- else -}}
{{ default "default" $account.name }}
{{- end -}}
{{- end }}

{{- define "leeway.image" -}}
{{- $own := index .root.Values .name -}}
{{- $image := $own.image -}}
{{- $registry := default .root.Values.global.imageRegistry $image.registry -}}
{{- $tag := default (printf "%s-%s" .root.Chart.AppVersion (ternary "cuda" "cpu" (gt (int ($own.gpus | default 0)) 0))) $image.tag -}}
{{- with $registry }}{{ . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $tag }}{{ end -}}
{{- end }}

{{- define "leeway.runId" -}}
{{ default (printf "%s.%s" .Release.Namespace .Release.Name) .Values.runId }}
{{- end }}

{{/* Trainer processes in one pod. */}}
{{- define "leeway.processes" -}}
{{ default (max 1 (int .Values.trainer.gpus)) .Values.trainer.processesPerPod | int }}
{{- end }}

{{/* The run's configuration: what was given, and what the chart knows itself. */}}
{{- define "leeway.config" -}}
{{- $run := deepCopy .Values.run -}}
{{- if not $run -}}
{{- $run = .Files.Get "files/demo.yaml" | fromYaml -}}
{{- end -}}
{{- $sampler := dict "http_host" "0.0.0.0" "http_port" 8080 "start_timeout_s" (int .Values.sampler.startupSeconds) -}}
{{- if not (hasKey (default dict $run.sampler) "tensor_parallel_size") -}}
{{- $_ := set $sampler "tensor_parallel_size" (max 1 (int .Values.sampler.gpus)) -}}
{{- end -}}
{{- $ranks := mul (int .Values.trainer.replicas) (int (include "leeway.processes" .)) -}}
{{- $own := dict "sampler" $sampler "trainer" (dict "ranks" $ranks) "telemetry" (dict "metrics_host" "0.0.0.0") -}}
{{- toYaml (mustMergeOverwrite $run $own) -}}
{{- end }}

{{/* Where Redis is, for one service: dict "root" $ "name" "sampler". The password stays in its secret. */}}
{{- define "leeway.redisEnv" -}}
{{- $root := .root -}}
{{- if $root.Values.redis.enabled }}
- name: LEEWAY_REDIS_URL
  value: redis://leeway-{{ .name }}@{{ include "leeway.name" (dict "root" $root "name" "redis") }}:6379/0
- name: LEEWAY_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "leeway.redisSecret" $root }}
      key: {{ index $root.Values.redis.auth.services .name }}
{{- else }}
{{- $redis := $root.Values.externalRedis }}
{{- $user := index $redis.users .name }}
- name: LEEWAY_REDIS_URL
  value: {{ ternary "rediss" "redis" $redis.tls.enabled }}://{{ with $user.username }}{{ . }}@{{ end }}{{ $redis.host }}:{{ int $redis.port }}/{{ int $redis.database }}
- name: LEEWAY_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $redis.existingSecret }}
      key: {{ $user.passwordKey }}
{{- if and $redis.tls.enabled $redis.tls.ca.secret }}
- name: SSL_CERT_FILE
  value: /etc/leeway/redis-ca/{{ $redis.tls.ca.key }}
{{- end }}
{{- end }}
{{- end }}

{{- define "leeway.redisSecret" -}}
{{ default (include "leeway.name" (dict "root" . "name" "redis")) .Values.redis.auth.existingSecret }}
{{- end }}

{{- define "leeway.volume.claim" -}}
{{- default (include "leeway.name" (dict "root" .root "name" .name)) .claim.existingClaim }}
{{- end }}
