{{/*
The pod, the same in every mode. Call it with root and, in mode statefulset, rank, the pod's in its copy
of the model; labels holds further labels.
*/}}
{{- define "tokenpod.podTemplate" -}}
{{- $root := .root -}}
{{- $rank := .rank -}}
{{- with .root.Values -}}
metadata:
  labels:
    {{- include "tokenpod.selector" $root | nindent 4 }}
    app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
    {{- with $.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: server
    {{- with .podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tokenpod.serviceAccountName" $root }}
  automountServiceAccountToken: false
  # Their variables would carry our names: TOKENPOD_PORT is a URL for a Service called tokenpod.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "tokenpod.gracePeriod" $root }}
  securityContext:
    {{- toYaml .podSecurityContext | nindent 4 }}
  {{- with .imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity:
    {{- tpl (toYaml .) $root | nindent 4 }}
  {{- end }}
  {{- with .topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- tpl (toYaml .) $root | nindent 4 }}
  {{- end }}
  {{- if or .proxy.enabled .cache.copyFromImage .initContainers (eq .model.source "download") }}
  initContainers:
    {{- if .proxy.enabled }}
    {{- include "tokenpod.proxy" $root | nindent 4 }}
    {{- end }}
    {{- if eq .model.source "download" }}
    {{- include "tokenpod.download" $root | nindent 4 }}
    {{- end }}
    {{- if .cache.copyFromImage }}
    # The cache's volume lies over the image's own folder.
    - name: kernels
      image: {{ include "tokenpod.image" $root | quote }}
      imagePullPolicy: {{ .image.pullPolicy }}
      command: [cp, -R, /var/cache/tokenpod/., /cache]
      resources: {requests: {cpu: 100m, memory: 64Mi}, limits: {memory: 64Mi}}
      securityContext:
        {{- toYaml .securityContext | nindent 8 }}
      volumeMounts:
        - {name: cache, mountPath: /cache}
    {{- end }}
    {{- with .initContainers }}
    {{- tpl (toYaml .) $root | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: server
      image: {{ include "tokenpod.image" $root | quote }}
      imagePullPolicy: {{ .image.pullPolicy }}
      command: [tokenpod, serve]
      args:
        {{- include "tokenpod.args" (dict "root" $root "rank" $rank) | nindent 8 }}
      env:
        {{- include "tokenpod.env" $root | nindent 8 }}
      {{- with .extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: {{ ternary "proxied" "grpc" .proxy.enabled }}, containerPort: {{ ternary .ports.proxied .ports.grpc .proxy.enabled }}}
        - {name: health, containerPort: {{ .ports.health }}}
        {{- if .telemetry.metrics.enabled }}
        - {name: metrics, containerPort: {{ .ports.metrics }}}
        {{- end }}
        {{- if gt (int .parallelism.pods) 1 }}
        - {name: rendezvous, containerPort: {{ .ports.rendezvous }}}
        - {name: plans, containerPort: {{ .ports.plans }}}
        {{- end }}
      {{- include "tokenpod.probes" $root | nindent 6 }}
      {{- if include "tokenpod.hasSleepAction" $root }}
      lifecycle:
        preStop:
          sleep:
            seconds: {{ .drain.preStopSeconds }}
      {{- end }}
      resources:
        {{- include "tokenpod.resources" $root | nindent 8 }}
      securityContext:
        {{- toYaml .securityContext | nindent 8 }}
      volumeMounts:
        {{- include "tokenpod.volumeMounts" $root | nindent 8 }}
    {{- if include "tokenpod.gatewayBeside" $root }}
    {{- include "tokenpod.gatewayContainer" $root | nindent 4 }}
    {{- end }}
    {{- with .extraContainers }}
    {{- tpl (toYaml .) $root | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "tokenpod.volumes" $root | nindent 4 }}
    {{- if include "tokenpod.gatewayBeside" $root }}
    {{- include "tokenpod.gatewayVolumes" $root | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}

{{/* Fills the model's claim, once: a folder that is there from the same address stays as it is. */}}
{{- define "tokenpod.download" -}}
{{- with .Values.model.download -}}
- name: download
  image: {{ include "tokenpod.image" $ | quote }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  command: [tokenpod, download]
  args:
    - {{ .url | quote }}
    - {{ include "tokenpod.modelPath" $ | quote }}
    {{- with .revision }}
    - {{ printf "--revision=%s" . | quote }}
    {{- end }}
    {{- if .existingSecret }}
    - --token-file=/etc/tokenpod/hub/token
    {{- end }}
  env:
    - name: HOME
      value: /tmp
    # The image says 1, for servers.
    - name: HF_HUB_OFFLINE
      value: "0"
    {{- with .env }}
    {{- tpl (toYaml .) $ | nindent 4 }}
    {{- end }}
  {{- with .envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    {{- toYaml .resources | nindent 4 }}
  securityContext:
    {{- toYaml $.Values.securityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: model, mountPath: /model}
    {{- if .existingSecret }}
    - {name: hub, mountPath: /etc/tokenpod/hub, readOnly: true}
    {{- end }}
{{- end -}}
{{- end }}

{{/* Variables: who this pod is, and where libraries may write. Settings are arguments. */}}
{{- define "tokenpod.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- if gt (int .Values.parallelism.pods) 1 }}
# The number of a LeaderWorkerSet's pod in its copy; that of a StatefulSet's copy.
- name: POD_INDEX
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ ternary "leaderworkerset.sigs.k8s.io/worker-index" "apps.kubernetes.io/pod-index" (eq .Values.parallelism.mode "lws") }}']"}}
{{- end }}
- name: HOME
  value: /tmp
- name: TRITON_CACHE_DIR
  value: /var/cache/tokenpod/triton
- name: NUMBA_CACHE_DIR
  value: /var/cache/tokenpod/numba
- name: HF_HUB_OFFLINE
  value: "1"
{{- if .Values.model.id }}
- name: HF_HUB_CACHE
  value: {{ include "tokenpod.modelPath" . }}
{{- end }}
{{- if .Values.telemetry.otlp.endpoint }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.pod.name=$(POD_NAME),k8s.namespace.name=$(POD_NAMESPACE),k8s.node.name=$(NODE_NAME)
{{- end }}
{{- with .Values.extraEnv }}
{{ tpl (toYaml .) $ }}
{{- end }}
{{- end }}

{{/*
Kubelet's own gRPC probes, on the port that is plaintext whatever the other one is. A pod gets
a little more than the server's own start timeout: then it is the server that says what is wrong.
*/}}
{{- define "tokenpod.probes" -}}
{{- $health := .Values.ports.health -}}
{{- with .Values.probes -}}
{{- $budget := default 600.0 $.Values.server.startTimeout -}}
startupProbe:
  grpc: {port: {{ $health }}, service: startup}
  periodSeconds: {{ .startup.periodSeconds }}
  timeoutSeconds: {{ .startup.timeoutSeconds }}
  failureThreshold: {{ ceil (divf (addf $budget 30) .startup.periodSeconds) }}
readinessProbe:
  grpc: {port: {{ $health }}, service: readiness}
  {{- toYaml .readiness | nindent 2 }}
livenessProbe:
  grpc: {port: {{ $health }}, service: liveness}
  {{- toYaml .liveness | nindent 2 }}
{{- end }}
{{- end }}

{{/* `resources` and the pod's GPUs: one a rank. */}}
{{- define "tokenpod.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if .Values.gpu.enabled -}}
{{- $gpus := dict .Values.gpu.resourceName (include "tokenpod.ranksPerPod" .) -}}
{{- $_ := set $resources "limits" (merge (dig "limits" dict $resources) $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}
