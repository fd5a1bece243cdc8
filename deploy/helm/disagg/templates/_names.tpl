{{/* Names and labels. */}}

{{- define "disagg.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* At most 40 characters: what Kubernetes makes of a StatefulSet's name must fit into a label. */}}
{{- define "disagg.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "disagg.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
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
