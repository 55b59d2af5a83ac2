{{/* Whether the gateway has pods of its own. */}}
{{- define "tokenpod.gatewayApart" -}}
{{- if and .Values.gateway.enabled (eq .Values.gateway.mode "deployment") }}true{{ end -}}
{{- end }}

{{/* Whether it is a container of the server's pods. */}}
{{- define "tokenpod.gatewayBeside" -}}
{{- if and .Values.gateway.enabled (eq .Values.gateway.mode "sidecar") }}true{{ end -}}
{{- end }}

{{/* The same in pods of its own and in those of the server, where other ports and volumes have names too. */}}
{{- define "tokenpod.gatewayContainer" -}}
{{- $gateway := .Values.gateway -}}
- name: gateway
  image: {{ include "tokenpod.imageOf" $gateway.image | quote }}
  imagePullPolicy: {{ $gateway.image.pullPolicy }}
  command: [smg, launch]
  args:
    {{- include "tokenpod.gatewayArgs" . | nindent 4 }}
  env:
    # Where it unpacks the pods' tokenizers.
    - name: HOME
      value: /tmp
    # See --control-plane-api-keys.
    - name: POD_UID
      valueFrom: {fieldRef: {fieldPath: metadata.uid}}
    {{- with $gateway.auth.existingSecret }}
    - name: CLIENT_KEY
      valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $gateway.auth.key | quote }}}}
    {{- end }}
  ports:
    - {name: http, containerPort: {{ $gateway.ports.http }}}
    - {name: gateway-health, containerPort: {{ $gateway.ports.health }}}
    - {name: gateway-metrics, containerPort: {{ $gateway.ports.metrics }}}
  # Ready once it knows a pod that serves.
  readinessProbe:
    httpGet: {path: /readiness, port: gateway-health}
    periodSeconds: 2
  livenessProbe:
    httpGet: {path: /liveness, port: gateway-health}
    periodSeconds: 10
    timeoutSeconds: 5
  {{- if and (include "tokenpod.gatewayBeside" .) (include "tokenpod.hasSleepAction" .) }}
  # As the server: endpoints are being removed.
  lifecycle:
    preStop:
      sleep:
        seconds: {{ .Values.drain.preStopSeconds }}
  {{- end }}
  resources:
    {{- toYaml $gateway.resources | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
    - {name: gateway-tmp, mountPath: /tmp}
    {{- if $gateway.tls.existingSecret }}
    - {name: gateway-tls, mountPath: /etc/gateway-tls, readOnly: true}
    {{- end }}
{{- end }}

{{- define "tokenpod.gatewayVolumes" -}}
- name: gateway-tmp
  emptyDir: {}
{{- with .Values.gateway.tls.existingSecret }}
- name: gateway-tls
  secret: {secretName: {{ . | quote }}}
{{- end }}
{{- end }}

{{- define "tokenpod.gatewayArgs" -}}
{{- $gateway := .Values.gateway -}}
- --host=0.0.0.0
- --port={{ $gateway.ports.http }}
- --health-check-port={{ $gateway.ports.health }}
- --prometheus-port={{ $gateway.ports.metrics }}
{{- if include "tokenpod.gatewayApart" . }}
- {{ printf "--policy=%s" $gateway.policy | quote }}
{{- end }}
- --shutdown-grace-period-secs={{ ceil $gateway.shutdownSeconds }}
# Its paths that replace pods by other addresses, empty caches and load code are for whom may read the
# pod's description, and not for all who may chat.
- --control-plane-api-keys=pod:pod:admin:$(POD_UID)
{{- if $gateway.auth.existingSecret }}
- --tenant-api-key=clients:$(CLIENT_KEY)
{{- end }}
{{- if $gateway.tls.existingSecret }}
- --tls-cert-path=/etc/gateway-tls/tls.crt
- --tls-key-path=/etc/gateway-tls/tls.key
{{- end }}
{{- if include "tokenpod.gatewayApart" . }}
- --service-discovery
- {{ printf "--service-discovery-namespace=%s" .Release.Namespace }}
- --service-discovery-port={{ .Values.ports.grpc }}
{{- else }}
# However long the server takes to start, and to start again: the gateway waits, and comes back soon.
- --worker-startup-timeout-secs=86400
- --worker-startup-check-interval=2
- --health-check-interval-secs=5
- --policy=passthrough
- --worker-urls=grpc://127.0.0.1:{{ ternary .Values.ports.loopback .Values.ports.grpc (not (empty .Values.tls.existingSecret)) }}
{{- end }}
{{- range $gateway.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- if include "tokenpod.gatewayApart" . }}
# It takes all that follows as labels.
- --selector
{{- range $key, $value := include "tokenpod.leaderSelector" . | fromYaml }}
- {{ printf "%s=%s" $key $value | quote }}
{{- end }}
{{- end }}
{{- end }}
