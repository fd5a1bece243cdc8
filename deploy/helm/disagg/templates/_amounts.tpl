{{/* Amounts: of memory, cores and devices, and which no pod could have. */}}

{{/* A quantity of Kubernetes, or a size of ours, as a number: "1.5Gi", "500m", "64GiB". */}}
{{- define "disagg.amount" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "([KMGTPEkm]i?)?B?$" $text -}}
{{- $power := dict "" 1.0 "m" 0.001 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $binary := dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf (float64 (trimSuffix $unit $text)) (get (merge $power $binary) (trimSuffix "B" $unit)) -}}
{{- end }}

{{/* Amounts that no pod could have: (root, role, own). */}}
{{- define "disagg.checkAmounts" -}}
{{- $limits := .own.resources.limits | default dict -}}
{{- range $name, $amount := .own.resources.requests -}}
{{- $limit := get $limits $name | toString -}}
{{- if and $limit (gt (include "disagg.amount" $amount | float64) (include "disagg.amount" $limit | float64)) -}}
{{- fail (printf "%s.resources.requests.%s is %v: it must be at most %s.resources.limits.%s, %s" $.role $name $amount $.role $name $limit) -}}
{{- end -}}
{{- end -}}
{{- $offload := .root.Values.offload -}}
{{- if and (ne .role "router") $offload.enabled $offload.hostMemory $limits.memory -}}
{{- $all := mulf (include "disagg.amount" $offload.hostMemory | float64) (include "disagg.ranks" . | float64) -}}
{{- if gt $all (include "disagg.amount" $limits.memory | float64) -}}
{{- fail (printf "offload.hostMemory is %v for each of %s ranks: that is more than %s.resources.limits.memory, %v" $offload.hostMemory (include "disagg.ranks" .) .role $limits.memory) -}}
{{- end -}}
{{- end -}}
{{- end }}
