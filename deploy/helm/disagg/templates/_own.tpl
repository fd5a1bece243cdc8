{{/* What is a person's to add, and what is the chart's own, by which pods are found, started again and named. */}}

{{/* (root, role, own) */}}
{{- define "disagg.checkAdded" -}}
{{- $labels := include "disagg.podLabels" . | fromYaml -}}
{{- range $name, $_ := .own.podLabels -}}
{{- if hasKey $labels $name -}}
{{- fail (printf "%s.podLabels: %s is a label of the chart, by which pods are found; take another name" $.role $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := .own.podAnnotations -}}
{{- if hasPrefix "checksum/" $name -}}
{{- fail (printf "%s.podAnnotations: %s: checksum/* are annotations of the chart, by which pods start again when settings change; take another name" $.role $name) -}}
{{- end -}}
{{- end -}}
{{- include "disagg.checkEnv" . -}}
{{- include "disagg.checkTolerations" . -}}
{{- end }}

{{- define "disagg.checkEnv" -}}
{{- $known := .root.Files.Get "settings.json" | fromJson -}}
{{- $taken := list -}}
{{- range include "disagg.env" (dict "role" .role "extraEnv" list) | fromYamlArray -}}
{{- $taken = append $taken .name -}}
{{- end -}}
{{- $names := list -}}
{{- range $i, $each := .own.extraEnv -}}
{{- $at := printf "%s.extraEnv[%d]" $.role $i -}}
{{- if or (has $each.name $taken) (has (upper $each.name) $known.environment) -}}
{{- fail (printf "%s: %s is the chart's: it sets it, or has a value for it, or checks it in config" $at $each.name) -}}
{{- end -}}
{{- if has $each.name $names -}}
{{- fail (printf "%s: %s is there twice" $at $each.name) -}}
{{- end -}}
{{- $names = append $names $each.name -}}
{{- if and (hasKey $each "value") (hasKey $each "valueFrom") -}}
{{- fail (printf "%s: %s has both value and valueFrom; give one of the two" $at $each.name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "disagg.checkTolerations" -}}
{{- range $i, $each := .own.tolerations -}}
{{- if and (not $each.key) (ne (toString $each.operator) "Exists") -}}
{{- fail (printf "%s.tolerations[%d]: no key: it needs one, or operator Exists, which without a key takes every taint" $.role $i) -}}
{{- end -}}
{{- if and (eq (toString $each.operator) "Exists") $each.value -}}
{{- fail (printf "%s.tolerations[%d]: operator Exists with the value %s: it takes every value; leave it out, or say Equal" $.role $i $each.value) -}}
{{- end -}}
{{- end -}}
{{- end }}
