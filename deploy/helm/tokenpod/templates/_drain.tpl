{{/*
How long a pod may take to end. Kubernetes waits for the sum, then kills:

    preStop        the endpoint is being removed; nothing has been told yet
    lame duck      told to stop, not ready any more, still serving who comes
    timeout        new work is refused, running requests finish
    leave          processes end and telemetry is sent: 5 + 6 + 4.5 s at most, and some air

A gateway in the same pod may need longer for the calls that it has.
*/}}
{{- define "tokenpod.gracePeriod" -}}
{{- $drain := .Values.drain -}}
{{- $gateway := ternary (ceil .Values.gateway.shutdownSeconds) 0 (not (empty (include "tokenpod.gatewayBeside" .))) -}}
{{- $server := add (ceil $drain.preStopSeconds) (ceil $drain.lameDuckSeconds) (ceil $drain.timeoutSeconds) 20 -}}
{{- max $server (add (ceil $drain.preStopSeconds) $gateway 10) -}}
{{- end }}

{{/* Before 1.30 there is no sleep action. The server's lame duck does the same, so it gets the time. */}}
{{- define "tokenpod.hasSleepAction" -}}
{{- if and (gt (int .Values.drain.preStopSeconds) 0) (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version) }}true{{ end -}}
{{- end }}

{{- define "tokenpod.lameDuckSeconds" -}}
{{- if include "tokenpod.hasSleepAction" . -}}
{{- .Values.drain.lameDuckSeconds | toJson -}}
{{- else -}}
{{- addf .Values.drain.lameDuckSeconds .Values.drain.preStopSeconds | toJson -}}
{{- end -}}
{{- end }}
