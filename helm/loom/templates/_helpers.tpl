{{- define "loom.labels" -}}
app.kubernetes.io/name: loom
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "loom.selector" -}}
app.kubernetes.io/name: loom
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "loom.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "loom.env" -}}
- name: LOOM_BOOTSTRAP
  value: {{ required "bootstrap: name your brokers" .Values.bootstrap | quote }}
- name: LOOM_TOPIC_PREFIX
  value: {{ .Values.topicPrefix | quote }}
- name: LOOM_PARTITIONS
  value: {{ .Values.partitions | quote }}
- name: LOOM_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ required "redisSecret: name the secret with the key redis-url" .Values.redisSecret }}
      key: redis-url
{{- range $name, $value := .Values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- /* Secrets whose keys are LOOM_* variables; nothing at all where there are none. */}}
{{- define "loom.envFrom" -}}
{{- with .Values.envSecrets -}}
envFrom:
  {{- range . }}
  - secretRef:
      name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "loom.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "loom.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}
