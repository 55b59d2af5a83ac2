{{/* What is mounted. The root file system is read-only: these are all places that can be written to. */}}

{{/* A downloaded model has a folder of its own: another revision gets another one. */}}
{{- define "tokenpod.modelPath" -}}
{{- $path := .Values.model.path -}}
{{- if and (eq .Values.model.source "download") (not $path) -}}
{{- $path = list .Values.model.download.url .Values.model.download.revision | compact | join "-" -}}
{{- $path = regexReplaceAll "[^A-Za-z0-9_.-]+" $path "-" | trimAll ".-" -}}
{{- end -}}
{{- list "/model" $path | compact | join "/" -}}
{{- end }}

{{- define "tokenpod.modelClaim" -}}
{{- default (printf "%s-model" (include "tokenpod.fullname" .)) .Values.model.existingClaim -}}
{{- end }}

{{- define "tokenpod.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
  {{- if .Values.cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.cache.existingClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.cache.sizeLimit }}
  {{- end }}
{{- if .Values.shm.enabled }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shm.size }}
{{- end }}
{{- include "tokenpod.modelVolume" . }}
{{- with .Values.tls }}
{{- if .existingSecret }}
- name: tls
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
{{- end }}
{{- if .mtls.enabled }}
- name: client-ca
  secret:
    secretName: {{ default .existingSecret .mtls.existingSecret }}
    defaultMode: 0440
    items:
      - {key: {{ .mtls.key }}, path: {{ .mtls.key }}}
{{- end }}
{{- if .shards.existingSecret }}
- name: shard-tls
  secret:
    secretName: {{ .shards.existingSecret }}
    defaultMode: 0440
    items:
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      - {key: ca.crt, path: ca.crt}
{{- end }}
{{- end }}
{{- with .Values.auth }}
{{- if .existingSecret }}
- name: auth
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items:
      - {key: {{ .key }}, path: {{ .key }}}
{{- end }}
{{- end }}
{{- with .Values.adapters }}
{{- if .existingSecret }}
- name: adapter-tokens
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items:
      - {key: {{ .key }}, path: {{ .key }}}
{{- end }}
{{- if .volume }}
- name: adapters
  {{- toYaml .volume | nindent 2 }}
{{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tokenpod.modelVolume" -}}
{{- with .Values.model }}
{{- if and (eq .source "download") .download.existingSecret }}
- name: hub
  secret:
    secretName: {{ .download.existingSecret }}
    defaultMode: 0440
    items:
      - {key: {{ .download.key }}, path: token}
{{- end }}
{{- if ne .source "demo" }}
- name: model
  {{- if eq .source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .existingClaim }}
    readOnly: true
  {{- else if eq .source "download" }}
  persistentVolumeClaim:
    claimName: {{ include "tokenpod.modelClaim" $ }}
  {{- else if eq .source "hostPath" }}
  hostPath:
    path: {{ .hostPath }}
    type: Directory
  {{- else if eq .source "oci" }}
  image:
    reference: {{ .image.reference }}
    pullPolicy: {{ .image.pullPolicy }}
  {{- else }}
  {{- toYaml .volume | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tokenpod.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/tokenpod
{{- if .Values.shm.enabled }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if ne .Values.model.source "demo" }}
- name: model
  mountPath: /model
  readOnly: true
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: tls
  mountPath: /etc/tokenpod/tls
  readOnly: true
{{- end }}
{{- if .Values.tls.mtls.enabled }}
- name: client-ca
  mountPath: /etc/tokenpod/client-ca
  readOnly: true
{{- end }}
{{- if .Values.tls.shards.existingSecret }}
- name: shard-tls
  mountPath: /etc/tokenpod/shard-tls
  readOnly: true
{{- end }}
{{- if .Values.auth.existingSecret }}
- name: auth
  mountPath: /etc/tokenpod/auth
  readOnly: true
{{- end }}
{{- if .Values.adapters.existingSecret }}
- name: adapter-tokens
  mountPath: /etc/tokenpod/adapters
  readOnly: true
{{- end }}
{{- if .Values.adapters.volume }}
- name: adapters
  mountPath: /adapters
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
