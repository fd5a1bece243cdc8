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
{{- include "disagg.checkSelectors" (dict "at" (printf "%s.affinity" .role) "value" .own.affinity) -}}
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
{{- if hasPrefix "DISAGG__" $each.name -}}
{{- include "disagg.checkSetting" (dict "known" $known "role" $.role "at" $at "each" $each) -}}
{{- end -}}
{{- if has $each.name $names -}}
{{- fail (printf "%s: %s is there twice" $at $each.name) -}}
{{- end -}}
{{- $names = append $names $each.name -}}
{{- if and (hasKey $each "value") (hasKey $each "valueFrom") -}}
{{- fail (printf "%s: %s has both value and valueFrom; give one of the two" $at $each.name) -}}
{{- end -}}
{{- if and (hasKey $each "valueFrom") (ne (len $each.valueFrom) 1) -}}
{{- fail (printf "%s.valueFrom: %s has %d sources; it needs one of secretKeyRef, configMapKeyRef, fieldRef and resourceFieldRef" $at $each.name (len $each.valueFrom)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A variable that is a setting. Settings have their place in config, where the schema sees them; a variable may be one that only
the pod knows. (known, role, at, each) */}}
{{- define "disagg.checkSetting" -}}
{{- $path := get .known.variables (upper .each.name) -}}
{{- if not $path -}}
{{- fail (printf "%s: %s: there is no such setting, and the process would not start; settings belong in config or %s.config" .at .each.name .role) -}}
{{- end -}}
{{- if and (has $path .known.mixedOnly) (ne .role "mixed") -}}
{{- fail (printf "%s: %s: only mixed servers have the setting %s; say mixed.config.%s" .at .each.name $path $path) -}}
{{- end -}}
{{- if not (or .each.valueFrom (contains "$(" (get .each "value" | default ""))) -}}
{{- fail (printf "%s: %s: say %s.config.%s (or config.%s for all), which is checked before anything starts; a variable may only have valueFrom, or $(VARIABLE) in its value" .at .each.name .role $path $path) -}}
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
{{- if and (hasKey $each "tolerationSeconds") (ne (toString $each.effect) "NoExecute") -}}
{{- fail (printf "%s.tolerations[%d]: tolerationSeconds without effect NoExecute: only that ends pods after a time" $.role $i) -}}
{{- end -}}
{{- end -}}
{{- end }}
