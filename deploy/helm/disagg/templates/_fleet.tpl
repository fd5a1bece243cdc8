{{/* For how long a rollout of routers may go on without one that is ready: that one is with its first pair, and its servers may take
worker.load_timeout_s to load; ten minutes more are for nodes and images. Kubernetes counts in 32 bits. */}}
{{- define "disagg.routerDeadline" -}}
{{- $most := 0.0 -}}
{{- range $role := include "disagg.pools" . | fromJsonArray -}}
{{- $set := include "disagg.effective" (dict "root" $ "role" $role) | fromJson -}}
{{- $most = maxf $most (include "disagg.seconds" $set.worker.load_timeout_s | float64) -}}
{{- end -}}
{{- printf "%d" (int64 (minf 2147483647.0 (addf (ceil $most) 600.0))) -}}
{{- end }}

{{/*
How routers find servers, in one place: settings of [router], as JSON. Servers are named after their pods. By `kubernetes` routers
watch the pods of this release; by `static` they have the list of all that there can be, by the names that a StatefulSet gives, and
go on dialling those that are not there.
*/}}
{{- define "disagg.fleet" -}}
{{- $root := . -}}
{{- if eq .Values.discovery "kubernetes" -}}
{{- $labels := printf "app.kubernetes.io/name=%s,app.kubernetes.io/instance=%s" (include "disagg.name" .) .Release.Name -}}
{{- toJson (dict "discovery" "kubernetes" "selector" $labels "namespace" .Release.Namespace) -}}
{{- else -}}
{{- $servers := list -}}
{{- range $role := include "disagg.pools" . | fromJsonArray -}}
{{- $pool := index $root.Values $role -}}
{{- $set := printf "%s-%s" (include "disagg.fullname" $root) $role -}}
{{- $most := int $pool.replicas -}}
{{- if $pool.autoscaling.enabled -}}{{- $most = int $pool.autoscaling.maxReplicas -}}{{- end -}}
{{- range $i := until $most -}}
{{- $host := printf "%s-%d.%s.%s.svc.%s" $set $i $set $root.Release.Namespace $root.Values.clusterDomain -}}
{{- $address := printf "%s:%d" $host (int $pool.ports.grpc) -}}
{{- $servers = append $servers (dict "name" (printf "%s-%d" $set $i) "role" $role "address" $address) -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "servers" $servers) -}}
{{- end -}}
{{- end }}
