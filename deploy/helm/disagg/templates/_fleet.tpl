{{/*
How routers find servers, in one place: settings of [router], as JSON. Servers are named after their pods, which a StatefulSet
gives stable names; a router has the list of all that there can be, and goes on dialling those that are not there.
*/}}
{{- define "disagg.fleet" -}}
{{- $root := . -}}
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
{{- end }}
