{{/* Amounts: of memory, cores and devices, and which no pod could have. */}}

{{/* A quantity of Kubernetes, or a size of ours, as a number: "1.5Gi", "500m", "64GiB". */}}
{{- define "disagg.amount" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "([KMGTPEkm]i?)?B?$" $text -}}
{{- $power := dict "" 1.0 "m" 0.001 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $binary := dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf (float64 (trimSuffix $unit $text)) (get (merge $power $binary) (trimSuffix "B" $unit)) -}}
{{- end }}

{{/* One amount that a container asks for: (at, kind, name, amount, all). */}}
{{- define "disagg.checkResource" -}}
{{- $text := include "disagg.quantity" .amount -}}
{{- $at := printf "%s.%s is %s" .at .name $text -}}
{{- $number := include "disagg.amount" $text | float64 -}}
{{- if eq .name "cpu" -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?m?$" $text) -}}
{{- fail (printf "%s: it is a number of cores, such as 4, 0.5 or 500m" $at) -}}
{{- end -}}
{{- else if or (has .name (list "memory" "ephemeral-storage")) (hasPrefix "hugepages-" .name) -}}
{{- if hasSuffix "m" $text -}}
{{- fail (printf "%s: m is a thousandth of a byte; say Mi or M" $at) -}}
{{- end -}}
{{- if hasPrefix "hugepages-" .name -}}
{{- $page := trimPrefix "hugepages-" .name -}}
{{- if not (regexMatch "^[1-9][0-9]*[KMG]i$" $page) -}}
{{- fail (printf "%s: huge pages have a size in their name, as hugepages-2Mi has" $at) -}}
{{- end -}}
{{- if mod (int64 $number) (int64 (include "disagg.amount" $page | float64)) -}}
{{- fail (printf "%s: it must be a multiple of %s" $at $page) -}}
{{- end -}}
{{- if not (or (hasKey .all "cpu") (hasKey .all "memory")) -}}
{{- fail (printf "%s: Kubernetes wants cpu or memory beside huge pages" $at) -}}
{{- end -}}
{{- end -}}
{{- else if not (regexMatch "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$" .name) -}}
{{- fail (printf "%s.%s: there is no such resource: it may be cpu, memory, ephemeral-storage, hugepages-SIZE, or a device as nvidia.com/gpu" .at .name) -}}
{{- else if ne (floor $number) $number -}}
{{- fail (printf "%s: devices are whole" $at) -}}
{{- end -}}
{{- end }}

{{/* Amounts that no pod could have: (root, role, own). */}}
{{- define "disagg.checkAmounts" -}}
{{- $limits := .own.resources.limits | default dict -}}
{{- range $kind, $amounts := .own.resources -}}
{{- range $name, $amount := $amounts -}}
{{- include "disagg.checkResource" (dict "at" (printf "%s.resources.%s" $.role $kind) "kind" $kind "name" $name "amount" $amount "all" $amounts) -}}
{{- end -}}
{{- end -}}
{{- range $name, $amount := .own.resources.requests -}}
{{- $limit := get $limits $name | toString -}}
{{- if and $limit (gt (include "disagg.amount" $amount | float64) (include "disagg.amount" $limit | float64)) -}}
{{- fail (printf "%s.resources.requests.%s is %v: it must be at most %s.resources.limits.%s, %s" $.role $name $amount $.role $name $limit) -}}
{{- end -}}
{{- end -}}
{{- /* Devices and huge pages are nobody else's: what is asked for is what there is. */ -}}
{{- range $name, $amount := .own.resources.requests -}}
{{- $copied := and $.root.Values.gpu.enabled (ne $.role "router") (eq $name $.root.Values.gpu.resource) (not (hasKey $limits $name)) -}}
{{- $asked := include "disagg.amount" $amount | float64 -}}
{{- if and (or (contains "/" $name) (hasPrefix "hugepages-" $name)) (not $copied) -}}
{{- if not (hasKey $limits $name) -}}
{{- fail (printf "%s.resources.requests.%s is %v without %s.resources.limits.%s: Kubernetes wants both, and equal; the limit alone does" $.role $name $amount $.role $name) -}}
{{- end -}}
{{- if ne $asked (include "disagg.amount" (get $limits $name) | float64) -}}
{{- fail (printf "%s.resources.requests.%s is %v: it must be equal to %s.resources.limits.%s, %v; the limit alone does" $.role $name $amount $.role $name (get $limits $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if ne .role "router" -}}
{{- range $value, $name := dict "shmSize" "memory" "cacheSize" "ephemeral-storage" -}}
{{- $limit := get $limits $name | toString -}}
{{- $size := get $.own $value -}}
{{- if and $limit (gt (include "disagg.amount" $size | float64) (include "disagg.amount" $limit | float64)) -}}
{{- fail (printf "%s.%s is %s: it must be at most %s.resources.limits.%s, %s, against which it counts" $.role $value $size $.role $name $limit) -}}
{{- end -}}
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
