{{/* The server's command line. */}}

{{- define "tokenpod.ranksPerPod" -}}
{{- div (int .Values.parallelism.tensor) (int .Values.parallelism.pods) -}}
{{- end }}

{{/* `maxBestOf: 2` as --max-best-of=2; a switch as --json-output or --no-json-output. */}}
{{- define "tokenpod.flag" -}}
{{- $name := kebabcase .name -}}
{{- if kindIs "bool" .value -}}
{{ ternary "--" "--no-" .value }}{{ $name }}
{{- else if kindIs "string" .value -}}
--{{ $name }}={{ .value }}
{{- else -}}
--{{ $name }}={{ .value | toJson }}
{{- end -}}
{{- end }}

{{/* A core a thread, one left for the front end: the server sees the node's cores, not the limit. */}}
{{- define "tokenpod.threads" -}}
{{- $limit := dig "limits" "cpu" "" .Values.resources | toString -}}
{{- if and $limit (not (hasKey .Values.server "threads")) -}}
{{- $cores := ternary (divf (trimSuffix "m" $limit) 1000) (float64 $limit) (hasSuffix "m" $limit) -}}
{{- max 1 (div (sub (floor $cores | int) 1) (include "tokenpod.ranksPerPod" . | int)) -}}
{{- end -}}
{{- end }}

{{/* A pod's place in its copy and where the leader of that is found. Call it with root and rank. */}}
{{- define "tokenpod.placeArgs" -}}
{{- if eq .root.Values.parallelism.mode "lws" -}}
- --node-rank=$(POD_INDEX)
- --master-addr=$(LWS_LEADER_ADDRESS)
{{- else -}}
- --node-rank={{ .rank }}
- --master-addr={{ include "tokenpod.placeName" (dict "root" .root "rank" 0) }}-$(POD_INDEX).{{ include "tokenpod.headlessName" .root }}.{{ .root.Release.Namespace }}.svc
{{- end -}}
{{- end }}

{{- define "tokenpod.modelArgs" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "demo" }}
- --model-id=demo
{{- else if $model.id }}
- {{ printf "--model-id=%s" $model.id | quote }}
{{- with $model.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- else }}
- {{ printf "--model-id=%s" (include "tokenpod.modelPath" .) | quote }}
{{- end }}
{{- end }}

{{/* List of arguments. Call it with root and rank, the pod's in its copy. */}}
{{- define "tokenpod.args" -}}
{{- $root := .root -}}
{{- with .root.Values -}}
{{- include "tokenpod.modelArgs" $root | trim }}
- --port={{ ternary .ports.proxied .ports.grpc .proxy.enabled }}
- --health-port={{ .ports.health }}
- --lame-duck-seconds={{ include "tokenpod.lameDuckSeconds" $root }}
- --graceful-termination-timeout={{ .drain.timeoutSeconds | toJson }}
{{- if gt (int .parallelism.tensor) 1 }}
- --num-shard={{ include "tokenpod.ranksPerPod" $root }}
{{- end }}
{{- if gt (int .parallelism.pods) 1 }}
- --num-nodes={{ .parallelism.pods }}
{{ include "tokenpod.placeArgs" (dict "root" $root "rank" $.rank) }}
- --master-port={{ .ports.rendezvous }}
- --shard-port={{ .ports.plans }}
{{- if not (hasKey .server "maxConnectionAgeSeconds") }}
- --max-connection-age-seconds=300
{{- end }}
{{- end }}
{{- with include "tokenpod.threads" $root }}
- --threads={{ . }}
{{- end }}
{{- if .tls.existingSecret }}
- --tls-cert=/etc/tokenpod/tls/tls.crt
- --tls-key=/etc/tokenpod/tls/tls.key
{{- end }}
{{- if .tls.mtls.enabled }}
- --tls-client-ca=/etc/tokenpod/client-ca/{{ .tls.mtls.key }}
{{- end }}
{{- if .tls.shards.existingSecret }}
- --shard-tls-cert=/etc/tokenpod/shard-tls/tls.crt
- --shard-tls-key=/etc/tokenpod/shard-tls/tls.key
- --shard-tls-ca=/etc/tokenpod/shard-tls/ca.crt
{{- end }}
{{- if .auth.existingSecret }}
- --auth-token-file=/etc/tokenpod/auth/{{ .auth.key }}
{{- end }}
{{- with .adapters }}
{{- if .existingSecret }}
- --adapter-token-file=/etc/tokenpod/adapters/{{ .key }}
{{- end }}
{{- if .volume }}
- --adapter-folder=/adapters
{{- end }}
{{- end }}
{{- with .telemetry.otlp }}
{{- if .endpoint }}
- {{ printf "--otlp-endpoint=%s" .endpoint | quote }}
- {{ printf "--otlp-service-name=%s" (default (include "tokenpod.fullname" $root) .serviceName) | quote }}
- --otlp-sample-ratio={{ .sampleRatio | toJson }}
{{- end }}
{{- end }}
{{- if .telemetry.metrics.enabled }}
- --metrics-port={{ .ports.metrics }}
{{- with .telemetry.metrics.names }}
- --metrics-names={{ join "," . }}
{{- end }}
{{- end }}
{{- if and .tls.existingSecret (include "tokenpod.gatewayBeside" $root) }}
- --loopback-port={{ .ports.loopback }}
{{- end }}
{{- if and (include "tokenpod.gatewayApart" $root) (not (hasKey .server "kvCacheEvents")) }}
# The gateway sends prompts where their beginning is cached.
- --kv-cache-events
{{- end }}
{{- range $name, $value := .server }}
- {{ include "tokenpod.flag" (dict "name" $name "value" $value) | quote }}
{{- end }}
{{- range .extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
