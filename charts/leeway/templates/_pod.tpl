{{/*
The pod of one of the run's services. Arguments: root, name, command (list), model ("directory" or "tokenizer"),
probes (YAML), and what else the container has: env, mounts, volumes, lifecycle (YAML each).
*/}}
{{- define "leeway.pod" -}}
{{- $root := .root -}}
{{- $own := index $root.Values .name -}}
{{- $gpus := int ($own.gpus | default 0) -}}
{{- $external := $root.Values.externalRedis -}}
{{- $ca := and (not $root.Values.redis.enabled) $external.tls.enabled $external.tls.ca.secret -}}
{{- $data := or $root.Values.data.existingClaim $root.Values.data.configMap -}}
metadata:
  labels:
    {{- include "leeway.labels" . | nindent 4 }}
    {{- with $own.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .name }}
    checksum/config: {{ include "leeway.config" $root | sha256sum }}
    {{- with $own.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "leeway.serviceAccount" . }}
  automountServiceAccountToken: {{ eq .name "controller" }}
  # Keeps Kubernetes from adding variables such as LEEWAY_TRAINER_PORT, which would be read as settings.
  enableServiceLinks: false
  {{- include "leeway.placement" . | nindent 2 }}
  initContainers:
    - name: model
      image: {{ include "leeway.image" (dict "root" $root "name" (ternary .name "trainer" (or (ne .name "controller") (not (include "leeway.builtIn" $root))))) }}
      imagePullPolicy: {{ $own.image.pullPolicy }}
      command: [leeway, model, prepare, /etc/leeway/run.yaml, --link, /model/current]
      {{- if and (eq .model "tokenizer") (not (include "leeway.builtIn" $root)) }}
      args: [--tokenizer-only]
      {{- end }}
      env:
        - {name: PYTHONUNBUFFERED, value: "1"}
        {{- with $root.Values.huggingFace.token }}
        {{- if .secret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
        {{- end }}
        {{- end }}
        {{- include "leeway.commonEnv" . | nindent 8 }}
      {{- with $own.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- toYaml $own.securityContext | nindent 8 }}
      {{- with $own.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- include "leeway.commonMounts" . | nindent 8 }}
  containers:
    - name: {{ .name }}
      image: {{ include "leeway.image" . }}
      imagePullPolicy: {{ $own.image.pullPolicy }}
      command:
        {{- range .command }}
        - {{ . | quote }}
        {{- end }}
      {{- with $own.extraArgs }}
      args:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: POD_NAMESPACE
          valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
        - name: LEEWAY_RUN
          value: {{ include "leeway.runId" $root | quote }}
        - name: LEEWAY_RELEASE
          value: {{ include "leeway.fullname" $root }}
        {{- include "leeway.redisEnv" . | nindent 8 }}
        {{- include "leeway.telemetryEnv" . | nindent 8 }}
        {{- include "leeway.commonEnv" . | nindent 8 }}
      {{- with $own.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: http, containerPort: 8080, protocol: TCP}
        - {name: metrics, containerPort: {{ int $root.Values.telemetry.metricsPort }}, protocol: TCP}
      {{- .probes | nindent 6 }}
      {{- with .lifecycle }}
      lifecycle:
        {{- . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- toYaml $own.securityContext | nindent 8 }}
      resources:
        {{- include "leeway.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "leeway.commonMounts" . | nindent 8 }}
        {{- with $own.shmSize }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $ca }}
        - {name: redis-ca, mountPath: /etc/leeway/redis-ca, readOnly: true}
        {{- end }}
        {{- with .mounts }}
        {{- . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "leeway.fullname" $root }}-run}
    - name: model
      emptyDir: {}
    - name: tmp
      emptyDir: {}
    - name: cache
      {{- if or $root.Values.modelCache.enabled $root.Values.modelCache.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ include "leeway.volume.claim" (dict "root" $root "name" "models" "claim" $root.Values.modelCache) }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- with $own.shmSize }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ . | quote }}}
    {{- end }}
    {{- if $ca }}
    - name: redis-ca
      secret: {secretName: {{ $external.tls.ca.secret }}}
    {{- end }}
    {{- if $data }}
    - name: data
      {{- if $root.Values.data.existingClaim }}
      persistentVolumeClaim: {claimName: {{ $root.Values.data.existingClaim }}, readOnly: true}
      {{- else }}
      configMap: {name: {{ $root.Values.data.configMap }}}
      {{- end }}
    {{- end }}
    {{- with .volumes }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $own.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Models that Leeway makes itself, with torch: the controller's image has none. */}}
{{- define "leeway.builtIn" -}}
{{- $model := dig "model" "name" "smollm2-135m-instruct" (include "leeway.config" . | fromYaml) -}}
{{- if has $model (list "tiny" "smollm2-135m-instruct") }}true{{ end -}}
{{- end }}

{{- define "leeway.commonEnv" -}}
{{- if or .root.Values.data.existingClaim .root.Values.data.configMap -}}
- {name: PYTHONPATH, value: /data}
{{ end }}
{{- with (index .root.Values .name).extraEnv }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{- define "leeway.telemetryEnv" -}}
{{- $otlp := .root.Values.telemetry.otlp -}}
{{- if $otlp.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ $otlp.endpoint | quote }}
- name: OTEL_EXPORTER_OTLP_PROTOCOL
  value: {{ $otlp.protocol }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME),service.namespace={{ .root.Release.Name }}
{{- if $otlp.headers.secret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom: {secretKeyRef: {name: {{ $otlp.headers.secret }}, key: {{ $otlp.headers.key }}}}
{{- end }}
{{- end }}
{{- end }}

{{- define "leeway.commonMounts" -}}
- {name: config, mountPath: /etc/leeway, readOnly: true}
- {name: model, mountPath: /model}
- {name: cache, mountPath: /cache}
- {name: tmp, mountPath: /tmp}
{{- if or .root.Values.data.existingClaim .root.Values.data.configMap }}
- {name: data, mountPath: /data, readOnly: true}
{{- end }}
{{- with (index .root.Values .name).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Resources with the GPUs. */}}
{{- define "leeway.resources" -}}
{{- $own := index .root.Values .name -}}
{{- $resources := deepCopy $own.resources -}}
{{- if gt (int ($own.gpus | default 0)) 0 -}}
{{- $gpus := dict .root.Values.global.gpuResource (toString $own.gpus) -}}
{{- $resources = mustMergeOverwrite (dict "limits" dict "requests" dict) $resources (dict "limits" $gpus "requests" $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* Where and as whom a pod runs. */}}
{{- define "leeway.placement" -}}
{{- $root := .root -}}
{{- $name := .name -}}
{{- $own := index $root.Values .name -}}
terminationGracePeriodSeconds: {{ int $own.terminationGracePeriodSeconds }}
{{- with concat $root.Values.global.imagePullSecrets $own.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $own.podSecurityContext | nindent 2 }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $constraint := . }}
  {{- if not .labelSelector }}
  {{- $labels := include "leeway.selector" (dict "root" $root "name" $name) | fromYaml }}
  {{- $constraint = merge (dict "labelSelector" (dict "matchLabels" $labels)) . }}
  {{- end }}
  - {{- toYaml $constraint | nindent 4 }}
  {{- end }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $own.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with $own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}
