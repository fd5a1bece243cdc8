{{/* Staging's sizes, as check_staging in disagg/config/check.py judges them: by what the device has where nothing is said. */}}

{{/* Bytes of a size of staging: (known, set, device, name). */}}
{{- define "disagg.stagingBytes" -}}
{{- $given := include "disagg.sizeBytes" (include "disagg.quantity" (get .set.transfer .name)) | float64 -}}
{{- if eq $given 0.0 -}}{{- $given = get (get .known.staging.sizes .device) .name | float64 -}}{{- end -}}
{{- int64 $given -}}
{{- end }}

{{/* Why staging cannot be so on a device: (known, set, at, device); empty if it can. */}}
{{- define "disagg.stagingRefusal" -}}
{{- $transfer := .set.transfer -}}
{{- $on := ternary "a CPU" "GPUs" (eq .device "cpu") -}}
{{- $bytes := dict -}}
{{- $said := dict -}}
{{- range $name := list "arena_bytes" "segment_bytes" "gather_bytes" -}}
{{- $number := include "disagg.stagingBytes" (merge (dict "name" $name) $) | int64 -}}
{{- $_ := set $bytes $name $number -}}
{{- $given := include "disagg.quantity" (get $transfer $name) -}}
{{- if eq (include "disagg.sizeBytes" $given | float64) 0.0 -}}
{{- $given = printf "%dKiB by default on %s" (div $number 1024) $on -}}
{{- end -}}
{{- $_ := set $said $name (printf "%s is %s" (get $.at (printf "transfer.%s" $name)) $given) -}}
{{- end -}}
{{- $page := int64 .known.staging.pageBytes -}}
{{- $links := int64 .known.staging.linksPerArena -}}
{{- $arena := $bytes.arena_bytes -}}
{{- $segment := $bytes.segment_bytes -}}
{{- if and (eq $transfer.kernels "triton") (eq .device "cpu") -}}
{{- printf "%s is triton, and gpu.enabled is false: Triton has no kernels for a CPU; it must be auto or torch" (get .at "transfer.kernels") -}}
{{- else if mod $arena $page -}}
{{- printf "%s: it must be a multiple of %d bytes" $said.arena_bytes $page -}}
{{- else if mod $segment $page -}}
{{- printf "%s: it must be a multiple of %d bytes" $said.segment_bytes $page -}}
{{- else if mod $bytes.gather_bytes $page -}}
{{- printf "%s: it must be a multiple of %d bytes" $said.gather_bytes $page -}}
{{- else if gt (mul $segment $links) $arena -}}
{{- printf "%s, and %s: a segment must be at most a quarter of the arena, so that several links find one" $said.segment_bytes $said.arena_bytes -}}
{{- else if mod $arena $segment -}}
{{- printf "%s, and %s: the arena must be a multiple of a segment, such as %dKiB" $said.arena_bytes $said.segment_bytes (div (mul $segment (div $arena $segment)) 1024) -}}
{{- else if gt (int64 $transfer.link_segments) (div (div $arena $segment) $links) -}}
{{- printf "%s is %d: one link may lease a quarter of the arena, so it must be at most %d (%s, and %s)" (get .at "transfer.link_segments") (int64 $transfer.link_segments) (div (div $arena $segment) $links) $said.arena_bytes $said.segment_bytes -}}
{{- else if gt $bytes.gather_bytes $segment -}}
{{- printf "%s, and %s: one piece must fit into a segment, so it must be at most as large" $said.gather_bytes $said.segment_bytes -}}
{{- end -}}
{{- end }}

{{/* On the device of a server; routers, which do not know it, take what goes on either: (root, role, known, set, at). */}}
{{- define "disagg.checkStaging" -}}
{{- $cuda := include "disagg.stagingRefusal" (merge (dict "device" "cuda") .) -}}
{{- $cpu := include "disagg.stagingRefusal" (merge (dict "device" "cpu") .) -}}
{{- $refusal := ternary $cuda $cpu .root.Values.gpu.enabled -}}
{{- if and $refusal (or (ne .role "router") (and $cuda $cpu)) -}}
{{- fail $refusal -}}
{{- end -}}
{{- end }}
