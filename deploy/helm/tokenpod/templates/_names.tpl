{{/* Names and labels. Every object's name begins with tokenpod.fullname. */}}

{{- define "tokenpod.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{/* Short enough for what follows it: a group's number, a pod's, the controllers' own suffixes. */}}
{{- define "tokenpod.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tokenpod.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tokenpod.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* What finds the pods of rank 0 to N of every group. */}}
{{- define "tokenpod.selector" -}}
app.kubernetes.io/name: {{ include "tokenpod.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{/* For objects that are no pods of the server. */}}
{{- define "tokenpod.labels" -}}
app.kubernetes.io/name: {{ include "tokenpod.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end }}

{{/* What finds the pods that clients may talk to: all, or the leaders. */}}
{{- define "tokenpod.leaderSelector" -}}
{{ include "tokenpod.selector" . }}
{{- if eq .Values.parallelism.mode "statefulset" }}
tokenpod-node-rank: "0"
{{- else if eq .Values.parallelism.mode "lws" }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}

{{/* The StatefulSet of the pods that have this rank in their copies. Call it with root and rank. */}}
{{- define "tokenpod.placeName" -}}
{{ include "tokenpod.fullname" .root }}-{{ ternary (printf "follower-%d" (int .rank)) "leader" (gt (int .rank) 0) }}
{{- end }}

{{/* The headless Service of shards: the chart's, or the one that a LeaderWorkerSet brings along. */}}
{{- define "tokenpod.headlessName" -}}
{{ include "tokenpod.fullname" . }}-shards
{{- end }}

{{- define "tokenpod.gatewayName" -}}
{{ include "tokenpod.fullname" . }}-gateway
{{- end }}

{{- define "tokenpod.gatewaySelector" -}}
app.kubernetes.io/name: {{ include "tokenpod.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{/* Call it with the image's values. */}}
{{- define "tokenpod.imageOf" -}}
{{- with .registry }}{{ . }}/{{ end -}}
{{- .repository -}}
{{- ternary (printf "@%s" .digest) (printf ":%s" .tag) (not (empty .digest)) -}}
{{- end }}

{{- define "tokenpod.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tokenpod.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* How pods are replaced. Defaults stay when the type changes, and others than RollingUpdate take none. */}}
{{- define "tokenpod.strategy" -}}
{{- toYaml (ternary . (omit . "rollingUpdate") (eq .type "RollingUpdate")) -}}
{{- end }}

{{/* Volumes that the restricted Pod Security Standard forbids: name and kind, one a line. */}}
{{- define "tokenpod.unrestrictedVolumes" -}}
{{- $allowed := list "configMap" "csi" "downwardAPI" "emptyDir" "ephemeral" "image" "persistentVolumeClaim" "projected" "secret" -}}
{{- $volumes := .Values.extraVolumes -}}
{{- if eq .Values.model.source "hostPath" -}}
{{- $volumes = append $volumes (dict "name" "model" "hostPath" .Values.model.hostPath) -}}
{{- else if eq .Values.model.source "volume" -}}
{{- $volumes = append $volumes (merge (dict "name" "model") .Values.model.volume) -}}
{{- end -}}
{{- range $volume := $volumes -}}
{{- range $kind := without (keys $volume | sortAlpha) "name" -}}
{{- if not (has $kind $allowed) }}
{{ $volume.name }}: {{ $kind }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "tokenpod.image" -}}
{{- $image := .Values.image -}}
{{- with $image.registry }}{{ . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest -}}
@{{ $image.digest }}
{{- else -}}
:{{ default (printf "%s-%s" .Chart.AppVersion (ternary "cuda" "cpu" .Values.gpu.enabled)) $image.tag }}
{{- end -}}
{{- end }}
