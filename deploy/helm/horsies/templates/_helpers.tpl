{{- define "horsies.image" -}}
image: {{ printf "%s:%s" $.Values.image.repository $.Values.image.tag | quote }}
imagePullPolicy: {{ $.Values.image.pullPolicy }}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
{{- end }}

{{- define "horsies.env" -}}
- {name: HORSIES_SCHEMA, value: {{ $.Values.schema | quote }}}
- {name: HORSIES_MIGRATE, value: "0"}
{{- range $.Values.env }}
- {{ toJson . }}
{{- end }}
{{- end }}

{{- define "horsies.pod" -}}
securityContext: {runAsNonRoot: true, runAsUser: 10001, seccompProfile: {type: RuntimeDefault}}
{{- if $.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson $.Values.imagePullSecrets }}
{{- end }}
{{- end }}
