{{/* What is a server's alone. */}}

{{/* How many ranks it has, of all data-parallel groups and pipeline stages: (root, role). */}}
{{- define "disagg.ranks" -}}
{{- with (include "disagg.effective" . | fromJson).server -}}{{ mul .tp .dp .pp }}{{- end -}}
{{- end }}

{{/* Its resources: a GPU for each rank, unless they are named: (root, role, own). */}}
{{- define "disagg.poolResources" -}}
{{- $gpu := .root.Values.gpu -}}
{{- $resources := deepCopy .own.resources -}}
{{- $named := dig "limits" $gpu.resource (dig "requests" $gpu.resource "" $resources) $resources -}}
{{- if and $gpu.enabled (eq (toString $named) "") -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict $gpu.resource (include "disagg.ranks" .))) -}}
{{- else if and $gpu.enabled (eq (toString (dig "limits" $gpu.resource "" $resources)) "") -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict $gpu.resource $named)) -}}
{{- end -}}
{{- include "disagg.resources" $resources -}}
{{- end }}

{{/* Whether it asks for RDMA devices, one at least: empty if not. */}}
{{- define "disagg.rdma" -}}
{{- range $name, $amount := merge (dict) (.resources.limits | default dict) (.resources.requests | default dict) -}}
{{- if and (hasPrefix "rdma/" $name) (gt (include "disagg.amount" $amount | float64) 0.0) -}}true{{- end -}}
{{- end -}}
{{- end }}

{{/* Where its pods may be: near the servers of the pairs, or as the values say. What is required of pairs is so beside that, too:
(root, role, own). */}}
{{- define "disagg.poolAffinity" -}}
{{- $affinity := deepCopy .own.affinity -}}
{{- $pairs := .root.Values.pairs.affinity -}}
{{- if and (ne .role "mixed") (or (eq $pairs "required") (and (eq $pairs "preferred") (not $affinity))) -}}
{{- $_ := set $affinity "podAffinity" (include "disagg.pairAffinity" . | fromYaml) -}}
{{- end -}}
{{- with $affinity -}}{{ toYaml . }}{{- end -}}
{{- end }}

{{/* Near the servers of the pairs: (root, role). */}}
{{- define "disagg.pairAffinity" -}}
{{- if eq .root.Values.pairs.affinity "required" -}}
requiredDuringSchedulingIgnoredDuringExecution:
  - {{- include "disagg.pairTerm" . | nindent 4 }}
{{- else -}}
preferredDuringSchedulingIgnoredDuringExecution:
  - weight: 100
    podAffinityTerm: {{- include "disagg.pairTerm" . | nindent 6 }}
{{- end -}}
{{- end }}

{{/* Both roles: the first pod of all may be anywhere. */}}
{{- define "disagg.pairTerm" -}}
topologyKey: {{ .root.Values.pairs.topologyKey | quote }}
labelSelector:
  matchLabels:
    app.kubernetes.io/name: {{ include "disagg.name" .root | quote }}
    app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
  matchExpressions:
    - {key: disagg/role, operator: In, values: [prefill, decode]}
{{- end }}

{{/* Up at once, and down a pod at a time: each has to drain. */}}
{{- define "disagg.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - {type: Percent, value: 100, periodSeconds: 60}
    - {type: Pods, value: 2, periodSeconds: 60}
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 120}
{{- end }}
