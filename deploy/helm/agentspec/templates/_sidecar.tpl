{{- /* For other charts too: `include "agentspec.sidecarContainer" .` in initContainers, and the volume below. */ -}}
{{- define "agentspec.sidecarContainer" -}}
name: agentspec-sidecar
image: {{ include "agentspec.image" (dict "image" .Values.sidecar.image "context" . "name" "sidecar.image") }}
imagePullPolicy: {{ .Values.sidecar.image.pullPolicy }}
{{- if .Values.sidecar.native }}
restartPolicy: Always
{{- end }}
args:
  - serve
  - --socket=/run/agentspec/draft.sock
  - --namespace={{ .Values.agentspec.namespace }}
  - --history-bytes={{ .Values.sidecar.historyBytes }}
  - --metrics-port={{ .Values.sidecar.metricsPort }}
  - --health-port={{ .Values.sidecar.healthPort }}
  {{- with .Values.agentspec.otlpEndpoint }}
  - --otlp-endpoint={{ . }}
  {{- end }}
  {{- range $name, $value := merge (dict) .Values.sidecar.options (include "agentspec.redisOptions" . | fromJson) }}
  - {{ printf "--%s=%v" ($name | replace "_" "-") $value | quote }}
  {{- end }}
ports:
  - name: sidecar-metrics
    containerPort: {{ .Values.sidecar.metricsPort }}
  - name: sidecar-health
    containerPort: {{ .Values.sidecar.healthPort }}
startupProbe:
  grpc:
    port: {{ .Values.sidecar.healthPort }}
  periodSeconds: 1
  failureThreshold: 60
readinessProbe:
  grpc:
    port: {{ .Values.sidecar.healthPort }}
  periodSeconds: 10
livenessProbe:
  grpc:
    port: {{ .Values.sidecar.healthPort }}
  periodSeconds: 10
  failureThreshold: 6
resources:
  {{- toYaml .Values.sidecar.resources | nindent 2 }}
securityContext:
  {{- include "agentspec.containerSecurity" . | nindent 2 }}
volumeMounts:
  - name: agentspec-socket
    mountPath: /run/agentspec
  {{- with include "agentspec.redisMount" . }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "agentspec.socketVolume" -}}
name: agentspec-socket
emptyDir:
  medium: Memory
  sizeLimit: 16Mi
{{- end -}}
