{{/* How routers are asked, by `helm test` and by people. */}}

{{/* Whether there is a test: of signed tokens the chart has none that it could show. */}}
{{- define "disagg.tested" -}}
{{- if or .Values.auth.apiKeys.secretName (not .Values.auth.jwks.secretName) -}}true{{- end -}}
{{- end }}

{{/* What empties a server: in a router's pod if that has a key to show, else from where the caller has one. */}}
{{- define "disagg.drainCommand" -}}
{{- $secure := include "disagg.tlsSecret" (dict "root" . "role" "router") -}}
{{- $in := include "disagg.tested" . -}}
{{- if $in -}}
kubectl -n {{ .Release.Namespace }} exec deploy/{{ include "disagg.fullname" . }}-router -- {{ end -}}
disagg drain SERVER --wait --http {{ ternary "https" "http" (ne $secure "") }}://127.0.0.1:{{ .Values.router.ports.http }}
{{- with .Values.auth.apiKeys }}{{ if .secretName }} --api-key-file /etc/disagg-auth/api-keys/{{ .key }}{{ end }}{{ end -}}
{{- if not $in }} --api-key-file TOKEN{{ end -}}
{{- if $secure }} --ca {{ ternary "/etc/disagg-tls/ca.crt" "ca.crt" (ne $in "") }}{{ end -}}
{{- end }}
