{{/* Names and labels. */}}

{{- define "disagg.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* At most 40 characters: what Kubernetes makes of a StatefulSet's name must fit into a label. A longer name ends with a hash of the
whole, or two releases whose names begin alike would have one. */}}
{{- define "disagg.cut" -}}
{{- if gt (len .) 40 -}}
{{- printf "%s-%s" (trunc 31 . | trimSuffix "-") (sha256sum . | trunc 8) -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end }}

{{- define "disagg.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := include "disagg.name" . -}}
{{- if contains $name .Release.Name -}}
{{- include "disagg.cut" .Release.Name -}}
{{- else -}}
{{- include "disagg.cut" (printf "%s-%s" .Release.Name $name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "disagg.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "disagg.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* Of routers, which may read pods where they are to find servers by them. */}}
{{- define "disagg.routerAccount" -}}
{{- if and .Values.serviceAccount.create (eq .Values.discovery "kubernetes") -}}
{{- printf "%s-router" (include "disagg.serviceAccount" .) -}}
{{- else -}}
{{- include "disagg.serviceAccount" . -}}
{{- end -}}
{{- end }}

{{/* (root, role): what finds the pods of a role, and never changes. */}}
{{- define "disagg.selector" -}}
app.kubernetes.io/name: {{ include "disagg.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
disagg/role: {{ .role }}
{{- end }}

{{/* Of everything. */}}
{{- define "disagg.commonLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
app.kubernetes.io/name: {{ include "disagg.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: disagg
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- end }}

{{/* (root, role) */}}
{{- define "disagg.labels" -}}
{{ include "disagg.commonLabels" .root }}
app.kubernetes.io/component: {{ .role }}
disagg/role: {{ .role }}
{{- end }}

{{/* Of pods, which a new version of the chart alone does not start again: (root, role). */}}
{{- define "disagg.podLabels" -}}
{{ include "disagg.selector" . }}
app.kubernetes.io/component: {{ .role }}
app.kubernetes.io/part-of: disagg
{{- end }}

{{/* The pools that are there, as a JSON list of roles. */}}
{{- define "disagg.pools" -}}
{{- $pools := list "prefill" "decode" -}}
{{- if .Values.mixed.enabled -}}{{- $pools = append $pools "mixed" -}}{{- end -}}
{{- toJson $pools -}}
{{- end }}

{{- define "disagg.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end }}
