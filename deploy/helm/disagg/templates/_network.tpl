{{/* Networks and peers in NetworkPolicies: what the schema cannot say, or not in words. */}}

{{/* Whether it is a network, as ADDRESS/BITS: empty if not. Each line is a way to write an address. */}}
{{- define "disagg.isNetwork" -}}
{{- $byte := "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])" -}}
{{- $four := printf "(%s\\.){3}%s" $byte $byte -}}
{{- $hex := "[0-9a-fA-F]{1,4}" -}}
{{- $ways := list (printf "(%s:){7}%s" $hex $hex) (printf "(%s:){1,7}:" $hex) (printf ":(:%s){1,7}" $hex) "::" (printf "::([fF]{4}:)?%s" $four) -}}
{{- range $left := untilStep 1 7 1 -}}
{{- $ways = append $ways (printf "(%s:){1,%d}(:%s){1,%d}" $hex $left $hex (sub 7 $left)) -}}
{{- end -}}
{{- if or (regexMatch (printf "^%s/([12]?[0-9]|3[0-2])$" $four) .) (regexMatch (printf "^(%s)/([1-9]?[0-9]|1[01][0-9]|12[0-8])$" (join "|" $ways)) .) -}}true{{- end -}}
{{- end }}

{{/* The bits of a network's address as text: 32 or 128 of them. */}}
{{- define "disagg.addressBits" -}}
{{- $address := first (splitList "/" .) -}}
{{- if not (contains ":" $address) -}}
{{- range splitList "." $address -}}{{- printf "%08b" (int .) -}}{{- end -}}
{{- else -}}
{{- $four := regexFind "[0-9]+(\\.[0-9]+){3}$" $address -}}
{{- if $four -}}
{{- $bytes := splitList "." $four -}}
{{- $high := printf "%02x%02x" (int (index $bytes 0)) (int (index $bytes 1)) -}}
{{- $address = printf "%s%s:%02x%02x" (trimSuffix $four $address) $high (int (index $bytes 2)) (int (index $bytes 3)) -}}
{{- end -}}
{{- $halves := splitList "::" $address -}}
{{- $left := compact (splitList ":" (first $halves)) -}}
{{- $right := list -}}
{{- if gt (len $halves) 1 -}}{{- $right = compact (splitList ":" (last $halves)) -}}{{- end -}}
{{- range $left -}}{{- printf "%016b" (int64 (printf "0x%s" .)) -}}{{- end -}}
{{- repeat (int (mul 16 (sub 8 (add (len $left) (len $right))))) "0" -}}
{{- range $right -}}{{- printf "%016b" (int64 (printf "0x%s" .)) -}}{{- end -}}
{{- end -}}
{{- end }}

{{/* (at, peers) */}}
{{- define "disagg.checkPeers" -}}
{{- $allowed := "it does not have the pattern ADDRESS/BITS of a network, such as 10.0.0.0/8 or fd00::/8" -}}
{{- range $i, $peer := .peers -}}
{{- $at := printf "%s.%d" $.at $i -}}
{{- include "disagg.checkSelectors" (dict "at" $at "value" $peer) -}}
{{- with $peer.ipBlock -}}
{{- if or (hasKey $peer "podSelector") (hasKey $peer "namespaceSelector") -}}
{{- fail (printf "%s: ipBlock beside a selector: a peer is one of the two; make two peers of it" $at) -}}
{{- end -}}
{{- if not (include "disagg.isNetwork" .cidr) -}}
{{- fail (printf "%s.ipBlock.cidr is %s: %s" $at .cidr $allowed) -}}
{{- end -}}
{{- $bits := int (last (splitList "/" .cidr)) -}}
{{- $network := trunc $bits (include "disagg.addressBits" .cidr) -}}
{{- $long := contains ":" .cidr -}}
{{- $cidr := .cidr -}}
{{- range $j, $except := .except -}}
{{- if not (include "disagg.isNetwork" $except) -}}
{{- fail (printf "%s.ipBlock.except.%d is %s: %s" $at $j $except $allowed) -}}
{{- end -}}
{{- $within := and (eq (contains ":" $except) $long) (hasPrefix $network (include "disagg.addressBits" $except)) -}}
{{- if not (and $within (gt (int (last (splitList "/" $except))) $bits)) -}}
{{- fail (printf "%s.ipBlock.except.%d is %s: it must be a part of the network %s, and less than all of it" $at $j $except $cidr) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Selectors of labels, wherever they are in it: (at, value). */}}
{{- define "disagg.checkSelectors" -}}
{{- if kindIs "map" .value -}}
{{- range $name, $each := .value -}}
{{- include "disagg.checkSelectors" (dict "at" (printf "%s.%s" $.at $name) "value" $each "rule" (has $name (list "matchExpressions" "matchFields"))) -}}
{{- end -}}
{{- else if kindIs "slice" .value -}}
{{- range $i, $each := .value -}}
{{- $at := printf "%s.%d" $.at $i -}}
{{- include (ternary "disagg.checkSelector" "disagg.checkSelectors" ($.rule | default false)) (dict "at" $at "value" $each) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "disagg.checkSelector" -}}
{{- $operator := .value.operator -}}
{{- $values := .value.values | default list -}}
{{- if and (has $operator (list "In" "NotIn")) (not $values) -}}
{{- fail (printf "%s: operator %s without values: it needs one at least" .at $operator) -}}
{{- end -}}
{{- if and (has $operator (list "Exists" "DoesNotExist")) $values -}}
{{- fail (printf "%s: operator %s with values: it asks for the key %s alone; leave them out, or say In or NotIn" .at $operator .value.key) -}}
{{- end -}}
{{- if and (has $operator (list "Gt" "Lt")) (not (and (eq (len $values) 1) (regexMatch "^-?[0-9]+$" (toString (first $values))))) -}}
{{- fail (printf "%s: operator %s: its values must be one whole number, as text" .at $operator) -}}
{{- end -}}
{{- if and (eq .value.key "metadata.name") (gt (len $values) 1) (not (contains "matchExpressions" .at)) -}}
{{- fail (printf "%s: a node's name can be one value only" .at) -}}
{{- end -}}
{{- end }}
