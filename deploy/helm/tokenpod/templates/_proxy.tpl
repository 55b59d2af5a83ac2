{{/* Envoy beside the server. A sidecar of Kubernetes' own kind: it starts before the server and ends after it. */}}
{{- define "tokenpod.proxy" -}}
{{- with .Values.proxy -}}
- name: proxy
  image: {{ include "tokenpod.imageOf" .image | quote }}
  imagePullPolicy: {{ .image.pullPolicy }}
  restartPolicy: Always
  command: [envoy]
  args:
    - --concurrency
    - {{ .concurrency | quote }}
    # Nothing but this pod's own server is behind it: it asks no control plane and has no admin port.
    - --disable-hot-restart
    - --log-level
    - warning
    - --config-yaml
    - {{ include "tokenpod.proxyConfig" $ | toJson }}
  ports:
    - {name: grpc, containerPort: {{ $.Values.ports.grpc }}}
  resources:
    {{- toYaml .resources | nindent 4 }}
  securityContext:
    {{- toYaml $.Values.securityContext | nindent 4 }}
{{- end -}}
{{- end }}

{{- define "tokenpod.proxyConfig" -}}
{{- $rate := float64 .Values.proxy.callsPerSecond -}}
{{- $often := ge $rate 100.0 -}}
{{- $filled := dict
  "MAX_CONNECTIONS" (int .Values.proxy.maxConnections)
  "MAX_STREAMS" (int .Values.proxy.maxStreamsPerConnection)
  "MAX_CALLS" (int .Values.proxy.maxCalls)
  "CALLS_PER_FILL" (ceil (ternary (divf $rate 10.0) $rate $often) | int)
  "FILL_INTERVAL" (ternary "0.1s" "1s" $often)
  "BURST" (max 1 (ceil $rate | int))
  "RETRY_MS" (mulf 1000 .Values.proxy.retrySeconds | int)
  "ADDRESS" (default "0.0.0.0" .Values.server.hostname)
  "SERVER_PORT" (int .Values.ports.proxied)
  "PORT" (int .Values.ports.grpc) -}}
{{- $text := .Files.Get "files/proxy.yaml" -}}
{{- range $name, $value := $filled -}}
{{- $text = regexReplaceAll (printf "[$]%s\\b" $name) $text (toString $value) -}}
{{- end -}}
{{- $text -}}
{{- end }}

{{- define "tokenpod.checkProxy" -}}
{{- with .Values.proxy -}}
{{- if .enabled -}}
{{- if not .callsPerSecond -}}
{{- fail "proxy.enabled: say in proxy.callsPerSecond how many calls each pod gets, one and a half times what it serves, say" -}}
{{- end -}}
{{- if $.Values.tls.existingSecret -}}
{{- fail "proxy.enabled with tls.existingSecret: the proxy speaks plaintext. Leave one of them out, and encrypt with a mesh" -}}
{{- end -}}
{{- if gt (int $.Values.parallelism.pods) 1 -}}
{{- fail (printf "proxy.enabled with parallelism.pods %v: it is for models in one pod" $.Values.parallelism.pods) -}}
{{- end -}}
{{- $version := $.Capabilities.KubeVersion.Version -}}
{{- if and (semverCompare "<1.29.0-0" $version) (ne $version "v1.20.0") -}}
{{- fail (printf "proxy.enabled: Kubernetes is %s, and sidecars need 1.29 or newer" $version) -}}
{{- end -}}
{{- if and (not .image.tag) (not .image.digest) -}}
{{- fail "proxy.image has neither tag nor digest" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
