{{/* Options of storage, as disagg/offload/options.py reads them: which there are for a URL, and what each may be. */}}

{{/* Where storage is: empty if there is none. */}}
{{- define "disagg.storageUrl" -}}
{{- default (ternary "file:///var/lib/disagg/kv" "" (ne .Values.storage.pvc.claimName "")) .Values.storage.url -}}
{{- end }}

{{/* What is refused is not repeated: it may be a secret. (kind, value, most); empty if it is fine, else what is allowed. */}}
{{- define "disagg.optionAllowed" -}}
{{- $text := toString .value -}}
{{- $number := regexMatch "^[0-9]+(\\.[0-9]*)?([eE][-+]?[0-9]{1,3})?$" $text -}}
{{- if eq .kind "switch" -}}
{{- if not (has (lower $text) (list "true" "false")) -}}true or false{{- end -}}
{{- else if eq .kind "address" -}}
{{- $port := regexFind "^[a-zA-Z]+://(\\[[^]]*\\]|[^/?#:]*):[0-9]+" $text | regexFind "[0-9]+$" -}}
{{- $fine := regexMatch "^(?i:https?)://(\\[[0-9a-fA-F:.]+\\]|[^\\s/?#@:\\[\\]]+)(:[0-9]{1,5})?([/?#]\\S*)?$" $text -}}
{{- if or (not $fine) (and $port (or (eq (atoi $port) 0) (gt (atoi $port) 65535))) -}}a URL, as https://host:port is{{- end -}}
{{- else if eq .kind "count" -}}
{{- if not (and $number (le (float64 $text) 1000.0) (eq (float64 $text) (floor (float64 $text)))) -}}a whole number from 0 to 1000{{- end -}}
{{- else if eq .kind "seconds" -}}
{{- if not (and $number (gt (float64 $text) 0.0) (le (float64 $text) (float64 .most))) -}}
{{- printf "a number of seconds without a unit, more than 0 and at most %v" .most -}}
{{- end -}}
{{- else if kindIs "bool" .value -}}a text{{- end -}}
{{- end }}

{{- define "disagg.checkStorageOptions" -}}
{{- $known := .Files.Get "settings.json" | fromJson -}}
{{- $instead := "it would be in a ConfigMap for all to read; name a secret in storage.credentialsSecret, whose keys become environment variables" -}}
{{- $url := include "disagg.storageUrl" . -}}
{{- $scheme := first (splitList "://" $url) -}}
{{- $options := .Values.storage.options -}}
{{- range $name, $value := $options -}}
{{- $end := regexMatch "_(file|url|id)$" (lower $name) -}}
{{- range $known.secretOptions -}}
{{- if hasSuffix . (lower $name) -}}
{{- fail (printf "storage.options.%s: %s" $name $instead) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "^[a-z0-9]+://[^/]*@" (toString $value) -}}
{{- fail (printf "storage.options.%s: it may have no user: %s" $name $instead) -}}
{{- end -}}
{{- if $url -}}
{{- $of := get $known.storageOptions $scheme -}}
{{- if not (hasKey $of $name) -}}
{{- if and (regexMatch "(?i)secret|token|password|key|sas$|credential|signature" $name) (not $end) -}}
{{- fail (printf "storage.options.%s: %s" $name $instead) -}}
{{- end -}}
{{- $list := keys $of | sortAlpha | join " " | default "none" -}}
{{- fail (printf "storage.options.%s is not an option of %s://: there are %s. Credentials are no options here: they belong into a secret, storage.credentialsSecret" $name $scheme $list) -}}
{{- end -}}
{{- with include "disagg.optionAllowed" (dict "kind" (get $of $name) "value" $value "most" $known.storageSeconds) -}}
{{- fail (printf "storage.options.%s: it must be %s" $name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name := list "endpoint" "aws_endpoint_url_s3" -}}
{{- if and (hasPrefix "http:" (get $options $name | toString)) (ne (get $options "allow_http" | toString | lower) "true") -}}
{{- fail (printf "storage.options.%s: it is http, which needs storage.options.allow_http: true, or https" $name) -}}
{{- end -}}
{{- end -}}
{{- end }}
