{{/* Amounts: of memory, cores and devices, and which no pod could have. */}}

{{/* A quantity of Kubernetes, or a size of ours, as a number: "1.5Gi", "500m", "64GiB". */}}
{{- define "disagg.amount" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "([KMGTPEkm]i?)?B?$" $text -}}
{{- $power := dict "" 1.0 "m" 0.001 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $binary := dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf (float64 (trimSuffix $unit $text)) (get (merge $power $binary) (trimSuffix "B" $unit)) -}}
{{- end }}

{{/* A size as Kubernetes writes it: (at, text). */}}
{{- define "disagg.checkSize" -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?([eE][0-9]+|k|Ki|[MGTPE]i?)?$" .text) -}}
{{- fail (printf "%s: Kubernetes writes sizes as a number with Ki, Mi, Gi or Ti (64Gi is 64 x 2^30 bytes) or k, M, G or T (64G is 64 x 10^9), without a B" .at) -}}
{{- end -}}
{{- end }}

{{/* One amount that a container asks for: (at, kind, name, amount, all). */}}
{{- define "disagg.checkResource" -}}
{{- $text := include "disagg.quantity" .amount -}}
{{- $at := printf "%s.%s is %s" .at .name $text -}}
{{- if not (or (eq .name "cpu") (regexMatch "^[0-9]+(\\.[0-9]+)?m$" $text)) -}}{{- include "disagg.checkSize" (dict "at" $at "text" $text) -}}{{- end -}}
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
{{- include "disagg.checkSize" (dict "at" (printf "%s.%s is %s" $.role $value $size) "text" $size) -}}
{{- if and $limit (gt (include "disagg.amount" $size | float64) (include "disagg.amount" $limit | float64)) -}}
{{- fail (printf "%s.%s is %s: it must be at most %s.resources.limits.%s, %s, against which it counts" $.role $value $size $.role $name $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Bytes in words: "512MiB" where that is exact, else the number. */}}
{{- define "disagg.showBytes" -}}
{{- $bytes := int64 . -}}
{{- $said := printf "%d bytes" $bytes -}}
{{- range $power, $unit := list "KiB" "MiB" "GiB" "TiB" -}}
{{- $scale := int64 (index (list 1024 1048576 1073741824 1099511627776) $power) -}}
{{- if and $bytes (eq (mod $bytes $scale) 0) -}}{{- $said = printf "%d%s" (div $bytes $scale) $unit -}}{{- end -}}
{{- end -}}
{{- $said -}}
{{- end }}

{{/* What a server's ranks take of the pod's memory beside everything else, as check_memory and check_host_memory judge it: their host
pools, and on a CPU their KV pools and staging. The processes themselves want some more, so it must be less than the limit.
(root, role, own, known, set, at) */}}
{{- define "disagg.checkServerMemory" -}}
{{- $limit := dig "limits" "memory" "" .own.resources | toString -}}
{{- $ranks := include "disagg.ranks" . | int64 -}}
{{- $parts := list -}}
{{- $all := 0.0 -}}
{{- $offload := .root.Values.offload -}}
{{- if and $offload.enabled $offload.hostMemory -}}
{{- $parts = append $parts (printf "offload.hostMemory is %s" (include "disagg.quantity" $offload.hostMemory)) -}}
{{- $all = include "disagg.amount" (include "disagg.quantity" $offload.hostMemory) | float64 -}}
{{- end -}}
{{- if not .root.Values.gpu.enabled -}}
{{- $kv := include "disagg.sizeBytes" (include "disagg.quantity" .set.engine.kv_memory_bytes) | float64 -}}
{{- $default := ternary " by default" "" (eq $kv 0.0) -}}
{{- if eq $kv 0.0 -}}{{- $kv = float64 .known.cpuPoolBytes -}}{{- end -}}
{{- $of := merge (dict "device" "cpu") . -}}
{{- $staging := 0 -}}
{{- if ne .role "mixed" -}}
{{- $staging = mul (include "disagg.stagingBytes" (merge (dict "name" "gather_bytes") $of) | int64) (int64 .set.transfer.gather_buffers) -}}
{{- end -}}
{{- /* A decode server sends what it has when it drains, too. */ -}}
{{- if eq .role "decode" -}}{{- $staging = add $staging (include "disagg.stagingBytes" (merge (dict "name" "arena_bytes") $of) | int64) -}}{{- end -}}
{{- $parts = append $parts (printf "%s is %s%s" (get .at "engine.kv_memory_bytes") (include "disagg.showBytes" (printf "%.0f" $kv)) $default) -}}
{{- if $staging -}}{{- $parts = append $parts (printf "staging takes %s" (include "disagg.showBytes" $staging)) -}}{{- end -}}
{{- $all = addf $all $kv (float64 $staging) -}}
{{- end -}}
{{- $all = mulf $all (float64 $ranks) -}}
{{- if and $limit (gt $all 0.0) (ge $all (include "disagg.amount" $limit | float64)) -}}
{{- fail (printf "%s for each of %d ranks: that is %s in all, and it must be less than %s.resources.limits.memory, %s" (join ", " $parts) $ranks (include "disagg.showBytes" (printf "%.0f" $all)) .role $limit) -}}
{{- end -}}
{{- end }}

{{/* What requests may keep in a router must fit into its pod, beside the router itself: (own, set, at). */}}
{{- define "disagg.checkRouterMemory" -}}
{{- $limit := dig "limits" "memory" "" .own.resources | toString -}}
{{- $text := include "disagg.quantity" .set.router.memory_bytes -}}
{{- $memory := include "disagg.sizeBytes" $text | float64 -}}
{{- if and $limit (ge $memory (include "disagg.amount" $limit | float64)) -}}
{{- fail (printf "%s is %s: it must be less than router.resources.limits.memory, %s, or a router that is full of requests is killed" (get .at "router.memory_bytes") (ternary (include "disagg.showBytes" $text) $text (regexMatch "^[0-9]+$" $text)) $limit) -}}
{{- end -}}
{{- end }}
