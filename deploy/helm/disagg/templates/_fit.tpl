{{/* Settings that do not fit together: every process would refuse them at its start (or no pair be found), again and again. */}}

{{/* Where a setting of a role was given: (root, role, section, name). */}}
{{- define "disagg.where" -}}
{{- if hasKey (dig .section dict (index .root.Values .role).config) .name -}}
{{ .role }}.config.{{ .section }}.{{ .name }}
{{- else -}}
config.{{ .section }}.{{ .name }}
{{- end -}}
{{- end }}

{{/* A duration of the settings in seconds: "500ms". */}}
{{- define "disagg.seconds" -}}
{{- if kindIs "string" . -}}
{{- $scale := dict "us" 0.000001 "ms" 0.001 "" 1.0 "s" 1.0 "m" 60.0 "h" 3600.0 -}}
{{- mulf (float64 (regexFind "^[0-9.]+" .)) (get $scale (regexFind "[a-z]*$" .)) -}}
{{- else -}}
{{ . }}
{{- end -}}
{{- end }}

{{/* A size of the settings in bytes, as disagg/config/sizes.py reads it: "512MiB", "512Mi", "1.5 gb". */}}
{{- define "disagg.sizeBytes" -}}
{{- $scale := dict "" 1.0 "k" 1e3 "m" 1e6 "g" 1e9 "t" 1e12 "ki" 1024.0 "mi" 1048576.0 "gi" 1073741824.0 "ti" 1099511627776.0 -}}
{{- $text := toString . -}}
{{- mulf (float64 (regexFind "^[0-9.]+" $text)) (get $scale (regexFind "[a-z]*$" (lower $text) | trimSuffix "b")) | printf "%.17g" -}}
{{- end }}

{{/* Sizes and durations that are texts, of which the schema sees the signs alone: (known, set, at). */}}
{{- define "disagg.checkBounds" -}}
{{- range $path, $bounds := .known.bounds -}}
{{- $parts := splitList "." $path -}}
{{- $value := dig (first $parts) (last $parts) "" $.set -}}
{{- if and (kindIs "string" $value) $value -}}
{{- $size := hasSuffix "_bytes" $path -}}
{{- $unit := ternary "bytes" "s" $size -}}
{{- $number := include (ternary "disagg.sizeBytes" "disagg.seconds" $size) $value | float64 -}}
{{- if and $size (ne (floor $number) $number) -}}
{{- fail (printf "%s is %s: it must come to whole bytes" (get $.at $path) $value) -}}
{{- end -}}
{{- if and (hasKey $bounds "minimum") (lt $number (float64 $bounds.minimum)) -}}
{{- fail (printf "%s is %s: it must be at least %d %s" (get $.at $path) $value (int64 $bounds.minimum) $unit) -}}
{{- end -}}
{{- if and (hasKey $bounds "exclusiveMinimum") (le $number (float64 $bounds.exclusiveMinimum)) -}}
{{- fail (printf "%s is %s: it must be more than %d %s" (get $.at $path) $value (int64 $bounds.exclusiveMinimum) $unit) -}}
{{- end -}}
{{- if and (hasKey $bounds "maximum") (gt $number (float64 $bounds.maximum)) -}}
{{- fail (printf "%s is %s: it must be at most %d %s" (get $.at $path) $value (int64 $bounds.maximum) $unit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $kv := dig "engine" "kv_memory_bytes" 0 .set -}}
{{- $pool := include "disagg.sizeBytes" (include "disagg.quantity" $kv) | float64 -}}
{{- if and (gt $pool 0.0) (lt $pool (float64 .known.leastKvBytes)) -}}
{{- fail (printf "%s is %v: it must be 0 (the server chooses) or at least %d bytes" (get .at "engine.kv_memory_bytes") $kv (int64 .known.leastKvBytes)) -}}
{{- end -}}
{{- end }}

{{/* (root, role, own) */}}
{{- define "disagg.checkFit" -}}
{{- $set := include "disagg.effective" . | fromJson -}}
{{- $server := $set.server -}}
{{- $engine := $set.engine -}}
{{- $at := dict -}}
{{- range $section, $settings := $set -}}
{{- range $name, $_ := $settings -}}
{{- $_ := set $at (printf "%s.%s" $section $name) (include "disagg.where" (dict "root" $.root "role" $.role "section" $section "name" $name)) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "dp" "pp" -}}
{{- if and (has $.role (list "prefill" "decode")) (gt (int (get $server $name)) 1) -}}
{{- fail (printf "%s is %d: only mixed servers can have more than 1, and %s servers would have it; say mixed.config.server.%s" (get $at (printf "server.%s" $name)) (int (get $server $name)) $.role $name) -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int $server.dp) 1) (gt (int $server.pp) 1) -}}
{{- fail (printf "%s is %d and %s is %d: data-parallel ranks have no pipeline stages; one of the two must be 1" (get $at "server.dp") (int $server.dp) (get $at "server.pp") (int $server.pp)) -}}
{{- end -}}
{{- if dig "offload" "enabled" false $set -}}
{{- range $name := list "dp" "pp" -}}
{{- if gt (int (get $server $name)) 1 -}}
{{- fail (printf "offload.enabled, and %s is %d: what data-parallel ranks or pipeline stages have is not offloaded; one of the two must be left out" (get $at (printf "server.%s" $name)) (int (get $server $name))) -}}
{{- end -}}
{{- end -}}
{{- if not $engine.prefix_cache -}}
{{- fail (printf "offload.enabled, and %s is false: what is offloaded is found again by the prefix cache" (get $at "engine.prefix_cache")) -}}
{{- end -}}
{{- end -}}
{{- $known := .root.Files.Get "settings.json" | fromJson -}}
{{- /* 0: each server chooses, and takes those of a CPU wherever longer ones do not fit. */ -}}
{{- $pageTokens := int64 ($engine.page_tokens | default $known.cpuPageTokens) -}}
{{- if mod (int64 $engine.checkpoint_tokens) $pageTokens -}}
{{- $why := ternary "" ", which servers choose where longer pages do not fit" (ne (int64 $engine.page_tokens) 0) -}}
{{- fail (printf "%s is %d: it must be a multiple of %s, %d%s" (get $at "engine.checkpoint_tokens") (int64 $engine.checkpoint_tokens) (get $at "engine.page_tokens") $pageTokens $why) -}}
{{- end -}}
{{- if and (gt (float64 $engine.target_step_ms) 0.0) (has $engine.policy $known.wholePrompts) -}}
{{- fail (printf "%s is %v: %s = %s computes prompts in one step, however long that takes" (get $at "engine.target_step_ms") $engine.target_step_ms (get $at "engine.policy") $engine.policy) -}}
{{- end -}}
{{- include "disagg.checkBounds" (dict "known" $known "set" $set "at" $at) -}}
{{- include "disagg.checkStaging" (dict "root" .root "role" .role "known" $known "set" $set "at" $at) -}}
{{- include "disagg.checkOwnPort" (dict "role" .role "router" $set.router "at" (get $at "router.own_http_port")) -}}
{{- if ne .role "router" -}}
{{- include "disagg.checkRecords" (merge (dict "directory" $set.record.dir "at" (get $at "record.dir")) .) -}}
{{- include "disagg.checkServerMemory" (merge (dict "known" $known "set" $set "at" $at) .) -}}
{{- else -}}
{{- include "disagg.checkRouterMemory" (dict "own" .own "set" $set "at" $at) -}}
{{- end -}}
{{- range $path, $least := $known.leastSeconds -}}
{{- $parts := splitList "." $path -}}
{{- $value := dig (first $parts) (last $parts) "" $set -}}
{{- if and (ne (toString $value) "") (lt (include "disagg.seconds" $value | float64) (float64 $least)) -}}
{{- fail (printf "%s is %v: it must be at least %v s" (get $at $path) $value $least) -}}
{{- end -}}
{{- end -}}
{{- $all := include "disagg.sizeBytes" (include "disagg.quantity" $set.router.memory_bytes) | float64 -}}
{{- $answer := include "disagg.sizeBytes" (include "disagg.quantity" $set.router.answer_bytes) | float64 -}}
{{- if gt $answer $all -}}
{{- fail (printf "%s is %s: it must be at most %s, %s: one answer may take what all may, not more" (get $at "router.answer_bytes") (include "disagg.quantity" $set.router.answer_bytes) (get $at "router.memory_bytes") (include "disagg.quantity" $set.router.memory_bytes)) -}}
{{- end -}}
{{- $lease := include "disagg.seconds" $set.router.lease_s | float64 -}}
{{- $beat := include "disagg.seconds" $set.router.heartbeat_s | float64 -}}
{{- if gt (mulf $beat 2.0) $lease -}}
{{- fail (printf "%s is %v: it must be at most half of %s, %v, or one late heartbeat loses every request" (get $at "router.heartbeat_s") $set.router.heartbeat_s (get $at "router.lease_s") $set.router.lease_s) -}}
{{- end -}}
{{- end }}

{{/* A router's further port. Servers judge it as well, beside the ports that a router has by default: (role, router, at). */}}
{{- define "disagg.checkOwnPort" -}}
{{- range $name := list "http" "grpc" -}}
{{- $port := int64 (get $.router (printf "%s_port" $name)) -}}
{{- if eq (int64 $.router.own_http_port) $port -}}
{{- if eq $.role "router" -}}
{{- fail (printf "%s is %d: that is router.ports.%s, too; they must differ" $.at $port $name) -}}
{{- end -}}
{{- fail (printf "%s is %d: servers read it, too, and %d is what they take for a router's %s port; say router.config.router.own_http_port, for routers alone" $.at $port $port $name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* What prefill and decode servers must have alike, or they never pair. */}}
{{- define "disagg.checkPairs" -}}
{{- $prefill := include "disagg.effective" (dict "root" . "role" "prefill") | fromJson -}}
{{- $decode := include "disagg.effective" (dict "root" . "role" "decode") | fromJson -}}
{{- range $path := list "engine.page_tokens" "engine.checkpoint_tokens" "model.dtype" -}}
{{- $parts := splitList "." $path -}}
{{- $one := toString (dig (first $parts) (last $parts) "" $prefill) -}}
{{- $other := toString (dig (first $parts) (last $parts) "" $decode) -}}
{{- if ne $one $other -}}
{{- fail (printf "prefill.config.%s, decode.config.%s: they are %s and %s, and only servers that have them alike make a pair; say config.%s, for both" $path $path $one $other $path) -}}
{{- end -}}
{{- end -}}
{{- end }}
