{{/* What each process is configured with, and how that is written as TOML. */}}

{{- define "disagg.modelMounted" -}}
{{- with .Values.model -}}{{- or .pvc.claimName .image.reference .hostPath.path -}}{{- end -}}
{{- end }}

{{/* The settings of one role as JSON: (root, role). What a person may set is merged first: what the chart decides counts. */}}
{{- define "disagg.settings" -}}
{{- $values := .root.Values -}}
{{- $own := index $values .role -}}
{{- $model := dict "cache_dir" "/var/cache/disagg/models" -}}
{{- if $values.model.name -}}{{- $_ := set $model "name" $values.model.name -}}{{- end -}}
{{- if include "disagg.modelMounted" .root -}}
{{- $_ := set $model "name" (trimSuffix "/" (printf "/model/%s" (trimPrefix "/" $values.model.path))) -}}
{{- end -}}
{{- if $values.model.servedName -}}{{- $_ := set $model "served_name" $values.model.servedName -}}{{- end -}}
{{- $given := mergeOverwrite (deepCopy $values.config) (deepCopy $own.config) -}}
{{- $decided := dict -}}
{{- $tls := include "disagg.tls" . | fromJson -}}
{{- /* Without certificates NetworkPolicies alone stand before servers, and NOTES say what is open. */ -}}
{{- $auth := ternary (dict) (dict "insecure" true) (hasKey $tls "ca") -}}
{{- if eq .role "router" -}}
{{- $router := dict "host" "::" "http_port" $own.ports.http "grpc_port" $own.ports.grpc "drain_s" $own.drainSeconds -}}
{{- $router = mergeOverwrite $router (include "disagg.fleet" .root | fromJson) -}}
{{- $auth = include "disagg.auth" .root | fromJson -}}
{{- $decided = dict "auth" $auth "model" $model "router" $router -}}
{{- else -}}
{{- $_ := set $model "device" (ternary "cuda" "cpu" $values.gpu.enabled) -}}
{{- $server := dict "tp" $own.tp "host" "::" "port" $own.ports.grpc "metrics_port" $own.ports.metrics "drain_s" $own.drainSeconds -}}
{{- $decided = mergeOverwrite (dict "auth" $auth "model" $model "server" $server) (include "disagg.tiers" .root | fromJson) -}}
{{- /* Pods reach each other over their network, not over a loopback that they share: UCX sees all that there is. */ -}}
{{- $given = mergeOverwrite (dict "transfer" (dict "ucx_tls" "" "ucx_net_devices" "")) $given -}}
{{- end -}}
{{- if $tls -}}{{- $_ := set $decided "tls" $tls -}}{{- end -}}
{{- mergeOverwrite $given $decided | toJson -}}
{{- end }}

{{/* The same, with the defaults of the settings that templates judge: (root, role). */}}
{{- define "disagg.effective" -}}
{{- $known := .root.Files.Get "settings.json" | fromJson -}}
{{- mergeOverwrite $known.defaults (include "disagg.settings" . | fromJson) | toJson -}}
{{- end }}

{{/* Whom routers ask for keys, as JSON: files that secrets are mounted as. */}}
{{- define "disagg.auth" -}}
{{- $auth := dict -}}
{{- with .Values.auth.apiKeys -}}
{{- if .secretName -}}{{- $_ := set $auth "api_keys_file" (printf "/etc/disagg-auth/api-keys/%s" .key) -}}{{- end -}}
{{- end -}}
{{- with .Values.auth.jwks -}}
{{- if .secretName -}}{{- $_ := set $auth "jwks_file" (printf "/etc/disagg-auth/jwks/%s" .key) -}}{{- end -}}
{{- with .audience -}}{{- $_ := set $auth "jwt_audience" . -}}{{- end -}}
{{- with .issuer -}}{{- $_ := set $auth "jwt_issuer" . -}}{{- end -}}
{{- end -}}
{{- with .Values.auth.quotas -}}
{{- if .secretName -}}{{- $_ := set $auth "limits_file" (printf "/etc/disagg-auth/quotas/%s" .key) -}}{{- end -}}
{{- end -}}
{{- with .Values.auth.operators -}}{{- $_ := set $auth "operators" . -}}{{- end -}}
{{- toJson ($auth | default (dict "insecure" true)) -}}
{{- end }}

{{/* KV beyond the GPU, as JSON. */}}
{{- define "disagg.tiers" -}}
{{- $offload := dict "enabled" .Values.offload.enabled -}}
{{- with .Values.offload.hostMemory -}}{{- $_ := set $offload "host_bytes" (include "disagg.bytes" .) -}}{{- end -}}
{{- $tiers := dict "offload" $offload -}}
{{- with .Values.storage -}}
{{- $url := include "disagg.storageUrl" $ -}}
{{- if $url -}}
{{- $storage := dict "url" $url "compression" .compression "options" .options -}}
{{- with .budget -}}{{- $_ := set $storage "budget_bytes" (include "disagg.bytes" .) -}}{{- end -}}
{{- $_ := set $tiers "storage" $storage -}}
{{- end -}}
{{- end -}}
{{- toJson $tiers -}}
{{- end }}

{{/* A size as settings have it, which Kubernetes writes without the B: 64Gi. */}}
{{- define "disagg.bytes" -}}
{{- regexReplaceAll "([KMGTk]i?)$" (include "disagg.quantity" .) "${1}B" -}}
{{- end }}

{{/* Sections of settings as TOML. */}}
{{- define "disagg.toml" -}}
{{- range $section, $settings := . }}
[{{ $section }}]
{{- range $name, $value := $settings }}
{{ $name }} = {{ include "disagg.tomlValue" $value }}
{{- end }}
{{ end }}
{{- end }}

{{/* One value: a JSON string is a TOML string, but for DEL, which TOML wants escaped; Helm's whole numbers are floats, which TOML tells apart. */}}
{{- define "disagg.tomlValue" -}}
{{- if kindIs "map" . -}}
{ {{- range $i, $name := keys . | sortAlpha }}{{ if $i }},{{ end }} {{ toJson $name }} = {{ include "disagg.tomlValue" (index $ $name) }}{{ end }} }
{{- else if kindIs "slice" . -}}
[{{ range $i, $each := . }}{{ if $i }}, {{ end }}{{ include "disagg.tomlValue" $each }}{{ end }}]
{{- else if and (kindIs "float64" .) (eq (floor .) (float64 .)) -}}
{{ int64 . }}
{{- else if or (kindIs "string" .) (kindIs "bool" .) -}}
{{ toJson . | replace "\u007f" "\\u007f" }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end }}

{{/* The file of one role: (root, role). */}}
{{- define "disagg.file" -}}
{{ include "disagg.toml" (include "disagg.settings" . | fromJson) | trim }}
{{- end }}
