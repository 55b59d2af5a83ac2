{{/* What a schema can't say: values that are right one by one and wrong together. */}}

{{- define "tokenpod.check" -}}
{{- include "tokenpod.checkVersion" . -}}
{{- include "tokenpod.checkParallelism" . -}}
{{- include "tokenpod.checkModel" . -}}
{{- include "tokenpod.checkScaling" . -}}
{{- include "tokenpod.checkNetwork" . -}}
{{- include "tokenpod.checkTelemetry" . -}}
{{- include "tokenpod.checkSecurity" . -}}
{{- include "tokenpod.checkFlags" . -}}
{{- include "tokenpod.checkGateway" . -}}
{{- include "tokenpod.checkRoutes" . -}}
{{- include "tokenpod.checkProxy" . -}}
{{- end }}

{{/* `helm template` asks no cluster; a helm that was built without its release flags then claims v1.20.0. */}}
{{- define "tokenpod.checkVersion" -}}
{{- $version := .Capabilities.KubeVersion.Version -}}
{{- if and (semverCompare "<1.28.0-0" $version) (ne $version "v1.20.0") -}}
{{- fail (printf "Kubernetes is %s: this chart needs 1.28 or newer. Where helm has asked no cluster, name yours with --kube-version" $version) -}}
{{- end -}}
{{- end }}

{{- define "tokenpod.checkRoutes" -}}
{{- if and .Values.grpcRoute.enabled (not .Values.grpcRoute.parentRefs) -}}
{{- fail "grpcRoute.enabled: name the Gateways that it belongs to in grpcRoute.parentRefs" -}}
{{- end -}}
{{- if .Values.inferencePool.enabled -}}
{{- if not .Values.inferencePool.endpointPicker.name -}}
{{- fail "inferencePool.enabled: name the picker's Service in inferencePool.endpointPicker.name" -}}
{{- end -}}
{{- if .Values.tls.existingSecret -}}
{{- fail "inferencePool.enabled with tls.existingSecret: gateways call the pods of a pool in plaintext. Leave one of them out" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "tokenpod.checkGateway" -}}
{{- with .Values.gateway -}}
{{- if .enabled -}}
{{- if eq .mode "deployment" -}}
{{- if $.Values.tls.existingSecret -}}
{{- fail "gateway.enabled with tls.existingSecret: the gateway calls pods that it has found by their addresses, in plaintext alone. Set gateway.mode=sidecar, or leave the certificate out and encrypt with a mesh" -}}
{{- end -}}
{{- if $.Values.auth.existingSecret -}}
{{- fail "gateway.enabled with auth.existingSecret: the gateway has no token for pods that it has found. Set gateway.mode=sidecar, and tls.existingSecret; or leave the tokens out, where networkPolicy says who may call" -}}
{{- end -}}
{{- else -}}
{{- if and $.Values.auth.existingSecret (not $.Values.tls.existingSecret) -}}
{{- fail "gateway.mode is sidecar with auth.existingSecret: it has no token, and needs none where the others' calls come over TLS. Set tls.existingSecret too" -}}
{{- end -}}
{{- if gt (int $.Values.parallelism.pods) 1 -}}
{{- fail (printf "gateway.mode is sidecar with parallelism.pods %v: it is for models in one pod" $.Values.parallelism.pods) -}}
{{- end -}}
{{- if .autoscaling.enabled -}}
{{- fail "gateway.autoscaling is enabled with gateway.mode sidecar: there are as many gateways as pods" -}}
{{- end -}}
{{- end -}}
{{- with .autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "gateway.autoscaling.minReplicas is %v: it must be at most gateway.autoscaling.maxReplicas, which is %v" .minReplicas .maxReplicas) -}}
{{- end -}}
{{- if and .enabled (not (dig "requests" "cpu" "" $.Values.gateway.resources)) -}}
{{- fail "gateway.autoscaling is enabled without gateway.resources.requests.cpu: its target is a share of that" -}}
{{- end -}}
{{- end -}}
{{- if and (has .policy (list "cache_aware")) (eq .mode "deployment") -}}
{{- if eq (toString (dig "kvCacheEvents" "" $.Values.server)) "false" -}}
{{- fail "gateway.policy is cache_aware with server.kvCacheEvents false: without them the gateway does not know what pods have cached. Choose another gateway.policy, such as round_robin" -}}
{{- end -}}
{{- end -}}
{{- $ports := list (int .ports.http) (int .ports.health) (int .ports.metrics) -}}
{{- if eq .mode "sidecar" -}}
{{- range $.Values.ports -}}
{{- $ports = append $ports (int .) -}}
{{- end -}}
{{- end -}}
{{- if ne (len $ports) (len ($ports | uniq)) -}}
{{- fail (printf "gateway.ports are %s%s: they must differ" (toJson .ports) (ternary (printf " and ports are %s" (toJson $.Values.ports)) "" (eq .mode "sidecar"))) -}}
{{- end -}}
{{- if and .service.nodePort (eq .service.type "ClusterIP") -}}
{{- fail (printf "gateway.service.nodePort is %v with gateway.service.type ClusterIP: it needs type NodePort or LoadBalancer" .service.nodePort) -}}
{{- end -}}
{{- if and (not .image.tag) (not .image.digest) -}}
{{- fail "gateway.image has neither tag nor digest" -}}
{{- end -}}
{{- range .extraArgs -}}
{{- $name := splitList "=" . | first -}}
{{- if has $name (list "--host" "--port" "--health-check-port" "--prometheus-port" "--policy" "--shutdown-grace-period-secs" "--service-discovery" "--discovery-provider" "--service-discovery-namespace" "--service-discovery-port" "--selector" "--worker-urls" "--worker-startup-timeout-secs" "--worker-startup-check-interval" "--health-check-interval-secs" "--tls-cert-path" "--tls-key-path") -}}
{{- fail (printf "gateway.extraArgs has %s: the chart sets it itself, from its own values" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "tokenpod.checkParallelism" -}}
{{- with .Values.parallelism -}}
{{- if mod (int .tensor) (int .pods) -}}
{{- fail (printf "parallelism.tensor is %v and parallelism.pods is %v: every pod must get the same number of ranks" .tensor .pods) -}}
{{- end -}}
{{- if and (eq .mode "pod") (ne (int .pods) 1) -}}
{{- fail (printf "parallelism.pods is %v with parallelism.mode pod: several pods need mode statefulset or lws" .pods) -}}
{{- end -}}
{{- if and (ne .mode "pod") (eq (int .pods) 1) -}}
{{- fail (printf "parallelism.pods is 1 with parallelism.mode %s: one pod holds the whole model, so take mode pod" .mode) -}}
{{- end -}}
{{- $rollout := .lws.rolloutStrategy.rollingUpdateConfiguration -}}
{{- $moves := without (list (toString $rollout.maxUnavailable) (toString $rollout.maxSurge)) "0" "0%" -}}
{{- if and (eq .mode "lws") (not $moves) -}}
{{- fail (printf "parallelism.lws.rolloutStrategy.rollingUpdateConfiguration has maxUnavailable %v and maxSurge %v: one of them must be above 0, or no copy can be replaced" $rollout.maxUnavailable $rollout.maxSurge) -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "limits" "requests" -}}
{{- if hasKey (dig $kind dict $.Values.resources) $.Values.gpu.resourceName -}}
{{- fail (printf "resources.%s has %s: set gpu.enabled, then a pod gets one for each of its ranks" $kind $.Values.gpu.resourceName) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "tokenpod.checkModel" -}}
{{- with .Values.model -}}
{{- if eq .source "hf" -}}
{{- fail "model.source is hf: nothing is downloaded at start by that name. Set model.source to download and model.download.url, or put the model on a volume (pvc)" -}}
{{- end -}}
{{- if and (eq .source "download") (not .download.url) -}}
{{- fail "model.source is download: say what in model.download.url" -}}
{{- end -}}
{{- if and (eq .source "download") .id -}}
{{- fail "model.source is download: model.id belongs to a Hugging Face cache; set model.download.url alone" -}}
{{- end -}}
{{- if and .download.url (ne .source "download") -}}
{{- fail (printf "model.download.url is set with model.source %s: set model.source to download" .source) -}}
{{- end -}}
{{- if and .download.revision (contains "://" .download.url) -}}
{{- fail (printf "model.download.revision is %s: only models of a hub have revisions" .download.revision) -}}
{{- end -}}
{{- if and (eq .source "pvc") (not .existingClaim) -}}
{{- fail "model.source is pvc: name the claim in model.existingClaim" -}}
{{- end -}}
{{- if and (eq .source "hostPath") (not .hostPath) -}}
{{- fail "model.source is hostPath: name the node's folder in model.hostPath" -}}
{{- end -}}
{{- if and (eq .source "volume") (not .volume) -}}
{{- fail "model.source is volume: describe it in model.volume, as in a pod" -}}
{{- end -}}
{{- if and (eq .source "oci") (not .image.reference) -}}
{{- fail "model.source is oci: name the image in model.image.reference" -}}
{{- end -}}
{{- if and (eq .source "oci") (semverCompare "<1.31.0-0" $.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.source is oci: image volumes need Kubernetes 1.31, and this is %s. Where helm has asked no cluster, name yours with --kube-version" $.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and (eq .source "oci") (not .image.featureGate) (semverCompare "<1.35.0-0" $.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.source is oci: Kubernetes %s drops image volumes without a word unless its feature gate ImageVolume is on. Set model.image.featureGate=true if it is, on the API server and on the nodes" $.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and (eq .source "demo") (or .id .path) -}}
{{- fail "model.source is demo: model.id and model.path belong to a volume, so set model.source too" -}}
{{- end -}}
{{- if and .revision (not .id) -}}
{{- fail "model.revision is set: only a model of a Hugging Face cache (model.id) has revisions" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "tokenpod.checkScaling" -}}
{{- with .Values.autoscaling -}}
{{- if and .hpa.enabled .keda.enabled -}}
{{- fail "autoscaling.hpa and autoscaling.keda are both enabled: two scalers would fight" -}}
{{- end -}}
{{- if or .hpa.enabled .keda.enabled -}}
{{- if eq $.Values.parallelism.mode "statefulset" -}}
{{- fail "autoscaling is enabled with parallelism.mode statefulset: a copy of the model is a pod of each StatefulSet, and a scaler would change one of them. Use mode lws, where a replica is a whole group" -}}
{{- end -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas is %v: it must be at most autoscaling.maxReplicas, which is %v" .minReplicas .maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- if and .hpa.enabled (eq (int .minReplicas) 0) -}}
{{- fail "autoscaling.minReplicas is 0 with autoscaling.hpa: only KEDA scales to none" -}}
{{- end -}}
{{- if and .hpa.enabled (not .hpa.metrics) -}}
{{- fail "autoscaling.hpa.metrics is empty: say what to scale by; CPU says nothing about a GPU server" -}}
{{- end -}}
{{- if and .keda.enabled (not .keda.triggers) -}}
{{- fail "autoscaling.keda.triggers is empty: say what to scale by" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "tokenpod.checkNetwork" -}}
{{- /* Numbers are of one type in files and of another with --set, and never equal across. */ -}}
{{- $ports := list -}}
{{- range .Values.ports -}}
{{- $ports = append $ports (int .) -}}
{{- end -}}
{{- if ne (len $ports) (len ($ports | uniq)) -}}
{{- fail (printf "ports are %s: they must differ" (toJson .Values.ports)) -}}
{{- end -}}
{{- with .Values.service -}}
{{- if and .headless (ne .type "ClusterIP") -}}
{{- fail (printf "service.headless is set with service.type %s: only a Service of type ClusterIP can be headless" .type) -}}
{{- end -}}
{{- if and .nodePort (eq .type "ClusterIP") -}}
{{- fail (printf "service.nodePort is %v with service.type ClusterIP: it needs type NodePort or LoadBalancer" .nodePort) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "tokenpod.checkTelemetry" -}}
{{- with .Values.telemetry.metrics -}}
{{- if and .podMonitor.enabled (not .enabled) -}}
{{- fail "telemetry.metrics.podMonitor is enabled: there is nothing to fetch without telemetry.metrics.enabled" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "tokenpod.checkSecurity" -}}
{{- with .Values -}}
{{- if and .adapters.existingSecret (not .adapters.volume) -}}
{{- fail "adapters.existingSecret is set: AdapterService loads from a volume, in adapters.volume" -}}
{{- end -}}
{{- if and .adapters.existingSecret (not (or .server.maxAdapters .server.loraAdapters)) -}}
{{- fail "adapters.existingSecret is set: say in server.maxAdapters for how many adapters there is to be room" -}}
{{- end -}}
{{- if and .tls.mtls.enabled (not .tls.existingSecret) -}}
{{- fail "tls.mtls is enabled: it needs the server's own certificate too, in tls.existingSecret" -}}
{{- end -}}
{{- if and .tls.shards.existingSecret (eq .parallelism.mode "pod") -}}
{{- fail "tls.shards.existingSecret is set with parallelism.mode pod: the ranks of one pod need no certificates" -}}
{{- end -}}
{{- if and .tls.mtls.enabled .helmTest.enabled (not .helmTest.tlsSecret) -}}
{{- fail "tls.mtls is enabled: name a client certificate for `helm test` in helmTest.tlsSecret, or set helmTest.enabled=false" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Flags that something else in the chart depends on. */}}
{{- define "tokenpod.checkFlags" -}}
{{- $removed := dict "draftTree" "drafts of a sequence are a chain now; server.speculate (--speculate) alone says how many" -}}
{{- range $name, $instead := $removed -}}
{{- if hasKey $.Values.server $name -}}
{{- fail (printf "server.%s is %v: it was removed: %s" $name (get $.Values.server $name) $instead) -}}
{{- end -}}
{{- end -}}
{{- $ours := list "--port" "--health-port" "--loopback-port" "--model-id" "--revision" "--num-shard" "--num-nodes" "--node-rank" "--master-addr" "--master-port" "--shard-port" "--lame-duck-seconds" "--graceful-termination-timeout" "--tls-cert" "--tls-key" "--tls-client-ca" "--shard-tls-cert" "--shard-tls-key" "--shard-tls-ca" "--auth-token-file" "--adapter-token-file" "--adapter-folder" "--otlp-endpoint" "--otlp-service-name" "--otlp-sample-ratio" "--metrics-port" "--metrics-names" -}}
{{- range .Values.extraArgs -}}
{{- $name := splitList "=" . | first -}}
{{- if has $name $ours -}}
{{- fail (printf "extraArgs has %s: the chart sets it itself, from its own values" $name) -}}
{{- end -}}
{{- end -}}
{{- end }}
