{{- define "agentspec.name" -}}
{{- .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "agentspec.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "agentspec.selectorLabels" -}}
app.kubernetes.io/name: {{ include "agentspec.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "agentspec.labels" -}}
{{ include "agentspec.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* An image: dict "image" (repository, tag, digest) "context" . "name" <value's path> */ -}}
{{- define "agentspec.image" -}}
{{- $tag := .image.tag | default .context.Chart.AppVersion -}}
{{- if not .image.repository -}}
{{- fail (printf "%s.repository: name the image that you built from deploy/docker and pushed" .name) -}}
{{- end -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else if eq $tag "latest" -}}
{{- fail (printf "%s.tag: `latest` changes under a running release; name a version or a digest" .name) -}}
{{- else -}}
{{ .image.repository }}:{{ $tag }}
{{- end -}}
{{- end -}}

{{- define "agentspec.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.securityId }}
runAsGroup: {{ .Values.securityId }}
fsGroup: {{ .Values.securityId }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "agentspec.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* Options of whoever shares histories through Redis; the files are those of the volume below. */ -}}
{{- define "agentspec.redisOptions" -}}
{{- $options := dict -}}
{{- with .Values.redis -}}
{{- if .url -}}
{{- $_ := set $options "redis" .url -}}
{{- with .username -}}{{- $_ := set $options "redis_username" . -}}{{- end -}}
{{- if .passwordSecret -}}{{- $_ := set $options "redis_password_file" "/run/secrets/redis/password" -}}{{- end -}}
{{- if .caSecret -}}{{- $_ := set $options "redis_tls_ca" "/run/secrets/redis/ca.crt" -}}{{- end -}}
{{- if .certificateSecret -}}
{{- $_ := set $options "redis_tls_cert" "/run/secrets/redis/tls.crt" -}}
{{- $_ := set $options "redis_tls_key" "/run/secrets/redis/tls.key" -}}
{{- end -}}
{{- if .keySecret -}}{{- $_ := set $options "redis_key_file" "/run/secrets/redis/key" -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $options | toJson -}}
{{- end -}}

{{- define "agentspec.redisMount" -}}
{{- if include "agentspec.redisSources" . -}}
- name: redis
  mountPath: /run/secrets/redis
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "agentspec.redisVolume" -}}
{{- with include "agentspec.redisSources" . -}}
- name: redis
  projected:
    defaultMode: 0440
    sources:
      {{- . | nindent 6 }}
{{- end -}}
{{- end -}}

{{- define "agentspec.redisSources" -}}
{{- $keys := dict "passwordSecret" (list "password") "caSecret" (list "ca.crt") "certificateSecret" (list "tls.crt" "tls.key") "keySecret" (list "key") -}}
{{- $sources := list -}}
{{- range $name, $files := $keys -}}
{{- with index $.Values.redis $name -}}
{{- $items := list -}}
{{- range $files -}}{{- $items = append $items (dict "key" . "path" .) -}}{{- end -}}
{{- $sources = append $sources (dict "secret" (dict "name" . "items" $items)) -}}
{{- end -}}
{{- end -}}
{{- with $sources -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{- /* What vLLM's `--additional-config` says. */ -}}
{{- define "agentspec.config" -}}
{{- $options := dict "namespace" .Values.agentspec.namespace "metrics_port" (int .Values.agentspec.metricsPort) -}}
{{- with .Values.agentspec.otlpEndpoint -}}{{- $_ := set $options "otlp_endpoint" . -}}{{- end -}}
{{- if ne .Values.mode "embedded" -}}
{{- $_ := set $options "mode" .Values.mode -}}
{{- $_ := set $options "socket" "/run/agentspec/draft.sock" -}}
{{- else -}}
{{- $options = merge $options (include "agentspec.redisOptions" . | fromJson) -}}
{{- end -}}
{{- dict "agentspec" (merge (dict) .Values.agentspec.options $options) | toJson -}}
{{- end -}}

{{- /* Contradictions that a schema can't see. */ -}}
{{- define "agentspec.check" -}}
{{- if not .Values.model -}}
{{- fail "model: name the model to serve, for instance --set model=Qwen/Qwen2.5-7B-Instruct" -}}
{{- end -}}
{{- $redis := list "redis" "redis_username" "redis_password_file" "redis_tls_ca" "redis_tls_cert" "redis_tls_key" "redis_key_file" -}}
{{- range $name := concat $redis (list "namespace" "metrics_port" "otlp_endpoint" "mode" "socket") -}}
{{- if hasKey $.Values.agentspec.options $name -}}
{{- fail (printf "agentspec.options.%s: the chart sets it; use its own value instead" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name := concat $redis (list "socket" "namespace" "history_bytes" "metrics_port" "health_port" "otlp_endpoint") -}}
{{- if hasKey $.Values.sidecar.options $name -}}
{{- fail (printf "sidecar.options.%s: the chart sets it; use its own value instead" $name) -}}
{{- end -}}
{{- end -}}
{{- $options := .Values.sidecar.options -}}
{{- if and (hasKey $options "tcp") (not (and (hasKey $options "tls_cert") (hasKey $options "tls_key") (hasKey $options "tls_client_ca") (hasKey $options "tls_identities"))) -}}
{{- fail "sidecar.options.tcp: TCP needs tls_cert, tls_key, tls_client_ca and tls_identities beside it" -}}
{{- end -}}
{{- if and (eq .Values.mode "embedded") (or .Values.sidecar.image.repository .Values.sidecar.options) -}}
{{- fail "mode: the sidecar has an image or options but is not used; set mode to hybrid or sidecar, or take them away" -}}
{{- end -}}
{{- range $name, $value := .Values.redis -}}
{{- if and $value (not $.Values.redis.url) -}}
{{- fail (printf "redis.%s: is given, but redis.url is not; name the Redis, or take it away" $name) -}}
{{- end -}}
{{- end -}}
{{- with .Values.redis -}}
{{- if and (or .caSecret .certificateSecret) (not (regexMatch "^(rediss|sentinels|clusters)://" .url)) -}}
{{- fail "redis.url: certificates are given, so it needs TLS: rediss://, sentinels:// or clusters://" -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.autoscaling.kind "keda") (not .Values.autoscaling.prometheusUrl) -}}
{{- fail "autoscaling.prometheusUrl: KEDA reads vLLM's metrics from Prometheus; name its URL" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail "autoscaling.minReplicas: must not be above maxReplicas" -}}
{{- end -}}
{{- end -}}
