{{/* What the schema cannot say, because it is about two values. Each message begins with a path. */}}

{{- define "disagg.check" -}}
{{- $values := .Values -}}
{{- $fullname := include "disagg.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $fullname) -}}
{{- fail (printf "fullnameOverride: Services of the release %s would be named %s-..., and a Service's name has lower case letters, digits and '-' only and begins with a letter; give fullnameOverride such a name, or the release" .Release.Name $fullname) -}}
{{- end -}}
{{- $image := .Values.image.repository -}}
{{- if contains "@" $image -}}
{{- fail (printf "image.repository is %s: it has a digest; say that in image.digest, and here what is before the @" $image) -}}
{{- end -}}
{{- if contains ":" (last (splitList "/" $image)) -}}
{{- fail (printf "image.repository is %s: it has a tag; say that in image.tag, and here what is before its colon" $image) -}}
{{- end -}}
{{- $named := 0 -}}
{{- range list .Values.model.name .Values.model.pvc.claimName .Values.model.image.reference .Values.model.hostPath.path -}}
{{- if . -}}{{- $named = add1 $named -}}{{- end -}}
{{- end -}}
{{- if gt (int $named) 1 -}}
{{- fail "model: at most one of model.name, model.pvc.claimName, model.image.reference and model.hostPath.path says where the model is" -}}
{{- end -}}
{{- if .Values.model.image.reference -}}
{{- include "disagg.checkImageVolume" (dict "root" . "at" "model.image") -}}
{{- end -}}
{{- if regexMatch "(^|/)\\.\\.(/|$)" .Values.model.hostPath.path -}}
{{- fail "model.hostPath.path: it may have no '..'; say the directory itself" -}}
{{- end -}}
{{- if and (include "disagg.modelMounted" .) (not .Values.model.servedName) -}}
{{- fail "model.servedName: clients need a name for a model that comes from a volume" -}}
{{- end -}}
{{- /* As _check_model in disagg/config/check.py: it goes into answers, paths, logs and labels. */ -}}
{{- $public := .Values.model.servedName | default (regexReplaceAll "/+$" .Values.model.name "" | splitList "/" | last) -}}
{{- if not (regexMatch "^[\\p{L}\\p{N}._/:@+=-]{0,128}$" $public) -}}
{{- fail (printf "model.servedName: without it clients would call the model %q; that must have letters, digits and ._-/:@+= only, and at most 128 characters: give it such a name" $public) -}}
{{- end -}}
{{- if and .Values.model.path (not (include "disagg.modelMounted" .)) -}}
{{- fail "model.path: it is a directory within a volume, and there is none: name one in model.pvc, model.image or model.hostPath" -}}
{{- end -}}
{{- if and (eq (int .Values.prefill.replicas) 0) (ne (int .Values.decode.replicas) 0) -}}
{{- fail "prefill.replicas is 0 and decode.replicas is not: a pool without the other serves nothing" -}}
{{- end -}}
{{- if and (eq (int .Values.decode.replicas) 0) (ne (int .Values.prefill.replicas) 0) -}}
{{- fail "decode.replicas is 0 and prefill.replicas is not: a pool without the other serves nothing" -}}
{{- end -}}
{{- if and (eq (int .Values.prefill.replicas) 0) (or (not .Values.mixed.enabled) (eq (int .Values.mixed.replicas) 0)) -}}
{{- fail "prefill.replicas, decode.replicas: there are no servers at all; mixed.enabled with mixed.replicas would do without them" -}}
{{- end -}}
{{- range $role := list "router" "prefill" "decode" "mixed" -}}
{{- include "disagg.checkRole" (dict "role" $role "own" (index $values $role) "root" $) -}}
{{- end -}}
{{- include "disagg.checkPairs" . -}}
{{- range $who := list "clientsFrom" "metricsFrom" -}}
{{- include "disagg.checkPeers" (dict "at" (printf "networkPolicy.%s" $who) "peers" (get $values.networkPolicy $who)) -}}
{{- end -}}
{{- include "disagg.checkTls" . -}}
{{- $common := include "disagg.labels" (dict "root" . "role" "router") | fromYaml -}}
{{- range $part := list "serviceMonitor" "prometheusRule" "dashboard" -}}
{{- range $name, $_ := (index $values $part).labels -}}
{{- if hasKey $common $name -}}
{{- fail (printf "%s.labels: %s is a label of the chart; take another name" $part $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.offload.hostMemory (not .Values.offload.enabled) -}}
{{- fail "offload.hostMemory: it is used with offload.enabled only" -}}
{{- end -}}
{{- if and (or .Values.storage.url .Values.storage.pvc.claimName) (not .Values.offload.enabled) -}}
{{- fail "storage.url: it is used with offload.enabled only" -}}
{{- end -}}
{{- if not (include "disagg.storageUrl" .) -}}
{{- range $name, $none := dict "budget" "" "compression" "none" "options" "map[]" -}}
{{- if ne (get $values.storage $name | toString) $none -}}
{{- fail (printf "storage.%s: there is no storage that it is about: say where it is in storage.url or storage.pvc.claimName" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.storage.pvc.claimName .Values.storage.url (not (regexMatch "^file:///var/lib/disagg/kv(/|$)" .Values.storage.url)) -}}
{{- fail "storage.url: the volume of storage.pvc is at file:///var/lib/disagg/kv" -}}
{{- end -}}
{{- if and (hasPrefix "file:" .Values.storage.url) (regexMatch "%|/\\.\\.?(/|$)" .Values.storage.url) -}}
{{- fail "storage.url: it must be a plain path in the volume at file:///var/lib/disagg/kv, without '.', '..' and '%'" -}}
{{- end -}}
{{- if and (hasPrefix "file:" .Values.storage.url) (not .Values.storage.pvc.claimName) -}}
{{- fail "storage.url: a directory in a pod is lost with it, and no other pod sees it: name a volume in storage.pvc.claimName" -}}
{{- end -}}
{{- range $path, $size := dict "offload.hostMemory" .Values.offload.hostMemory "storage.budget" .Values.storage.budget -}}
{{- if and (kindIs "string" $size) $size -}}
{{- $number := include "disagg.sizeBytes" $size | float64 -}}
{{- if or (ne (floor $number) $number) (lt $number 1.0) -}}
{{- fail (printf "%s is %s: it must come to whole bytes, and more than none" $path $size) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "disagg.checkSecrets" . -}}
{{- if and .Values.auth.operators (not (or .Values.auth.apiKeys.secretName .Values.auth.jwks.secretName)) -}}
{{- fail "auth.operators: tenants are told by keys or tokens, and none are asked for: see auth.apiKeys and auth.jwks" -}}
{{- end -}}
{{- if and .Values.auth.quotas.secretName (not (or .Values.auth.apiKeys.secretName .Values.auth.jwks.secretName)) -}}
{{- fail "auth.quotas.secretName: tenants are told by keys or tokens, and none are asked for: see auth.apiKeys and auth.jwks" -}}
{{- end -}}
{{- if and (or .Values.auth.jwks.audience .Values.auth.jwks.issuer) (not .Values.auth.jwks.secretName) -}}
{{- fail "auth.jwks.secretName: auth.jwks.audience and auth.jwks.issuer are looked for in tokens, and none are taken" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled (or .Values.auth.apiKeys.secretName .Values.auth.jwks.secretName) (not .Values.serviceMonitor.credentials.secretName) -}}
{{- fail "serviceMonitor.credentials.secretName: routers ask for keys (auth), also for their metrics, and Prometheus would have none" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) -}}
{{- if or .Values.serviceMonitor.enabled .Values.autoscaling.scrapedOtherwise -}}
{{- fail (printf "networkPolicy.metricsFrom: nobody may scrape servers, and %s says that somebody does; name who, or networkPolicy.enabled = false" (ternary "serviceMonitor.enabled" "autoscaling.scrapedOtherwise" .Values.serviceMonitor.enabled)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.hosts: an Ingress needs one at least" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: an HTTPRoute needs a Gateway" -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.name: with serviceAccount.create = false it names an existing one" -}}
{{- end -}}
{{- end }}

{{/* Values end up in a ConfigMap, which more people read than secrets. What is refused is not repeated. */}}
{{- define "disagg.checkSecrets" -}}
{{- $instead := "it would be in a ConfigMap for all to read; name a secret in storage.credentialsSecret, whose keys become environment variables" -}}
{{- if regexMatch "^[a-z0-9]+://[^/]*[@?]|[?#]" .Values.storage.url -}}
{{- fail (printf "storage.url: it may have neither a user nor a query: %s" $instead) -}}
{{- end -}}
{{- include "disagg.checkStorageOptions" . -}}
{{- end }}

{{/* (role, own, root) */}}
{{- define "disagg.checkRole" -}}
{{- $own := .own -}}
{{- $needed := add $own.preStopSeconds $own.drainSeconds 5 -}}
{{- if lt (int64 $own.terminationGracePeriodSeconds) (int64 $needed) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d: it must be at least preStopSeconds + drainSeconds + 5 = %d, or a drain is cut short" .role (int64 $own.terminationGracePeriodSeconds) (int64 $needed)) -}}
{{- end -}}
{{- /* By number: --set and a file of values give numbers of two kinds, which uniq tells apart. */ -}}
{{- $taken := dict -}}
{{- range $name, $port := $own.ports -}}
{{- with get $taken (int64 $port | toString) -}}
{{- fail (printf "%s.ports.%s is %d, as %s.ports.%s is: they must differ" $.role $name (int64 $port) $.role .) -}}
{{- end -}}
{{- $_ := set $taken (int64 $port | toString) $name -}}
{{- end -}}
{{- with $own.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas is %d: it must be at most maxReplicas = %d" $.role (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- if ne $.role "router" -}}{{- include "disagg.checkTargets" $ -}}{{- end -}}
{{- if .enabled -}}{{- include "disagg.checkScaling" $ -}}{{- end -}}
{{- end -}}
{{- include "disagg.checkAdded" . -}}
{{- if or (ne .role "mixed") $own.enabled -}}{{- include "disagg.checkAmounts" . -}}{{- include "disagg.checkFit" . -}}{{- end -}}
{{- if ne .role "router" -}}
{{- include "disagg.checkGpus" . -}}
{{- if and $own.affinity.podAffinity (ne .role "mixed") (eq .root.Values.pairs.affinity "required") -}}
{{- fail (printf "%s.affinity.podAffinity: pairs.affinity is required, which is a podAffinity, too, and a pod has one; say pairs.affinity: none, and here both" .role) -}}
{{- end -}}
{{- if and (eq $own.updateStrategy.type "OnDelete") (gt (int $own.updateStrategy.partition) 0) -}}
{{- fail (printf "%s.updateStrategy.partition is %d: it is used with type RollingUpdate only" .role (int $own.updateStrategy.partition)) -}}
{{- end -}}
{{- $most := int $own.replicas -}}
{{- if $own.autoscaling.enabled -}}{{- $most = int $own.autoscaling.maxReplicas -}}{{- end -}}
{{- if and (gt (int $own.updateStrategy.partition) 0) (ge (int $own.updateStrategy.partition) $most) (or (ne .role "mixed") $own.enabled) -}}
{{- fail (printf "%s.updateStrategy.partition is %d, and pods have the numbers 0 to %d: none would be rolled; it must be less than %s, %d" .role (int $own.updateStrategy.partition) (sub $most 1) (ternary (printf "%s.autoscaling.maxReplicas" .role) (printf "%s.replicas" .role) $own.autoscaling.enabled) $most) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Autoscalers count in thousandths: what is less is none. */}}
{{- define "disagg.checkTargets" -}}
{{- $scaling := .own.autoscaling -}}
{{- $target := float64 $scaling.target -}}
{{- if or (lt $target 0.001) (gt $target 1e6) -}}
{{- fail (printf "%s.autoscaling.target is %v: it must be at least 0.001 and at most 1000000" .role $scaling.target) -}}
{{- end -}}
{{- $itl := float64 ($scaling.itlSeconds | default 0) -}}
{{- if and (gt $itl 0.0) (lt $itl 0.001) -}}
{{- fail (printf "%s.autoscaling.itlSeconds is %v: it must be 0, or at least 0.001" .role $scaling.itlSeconds) -}}
{{- end -}}
{{- if and $scaling.enabled (gt $itl 0.0) (ne .root.Values.autoscaling.engine "keda") -}}
{{- fail (printf "%s.autoscaling.itlSeconds is %v: only KEDA minds it, and autoscaling.engine is %s; set it to 0, or the engine to keda" .role $scaling.itlSeconds .root.Values.autoscaling.engine) -}}
{{- end -}}
{{- end }}

{{- define "disagg.checkScaling" -}}
{{- $values := .root.Values -}}
{{- if eq .role "router" -}}
{{- if not (dig "requests" "cpu" "" .own.resources) -}}
{{- fail "router.autoscaling: its target is a share of router.resources.requests.cpu, which is not set" -}}
{{- end -}}
{{- else if eq $values.autoscaling.engine "keda" -}}
{{- if not $values.autoscaling.prometheusAddress -}}
{{- fail "autoscaling.prometheusAddress: KEDA asks a Prometheus, and does not know which" -}}
{{- end -}}
{{- if not (or $values.serviceMonitor.enabled $values.autoscaling.scrapedOtherwise) -}}
{{- fail (printf "%s.autoscaling: KEDA asks for what serviceMonitor.enabled has collected, by labels that it adds; or say autoscaling.scrapedOtherwise" .role) -}}
{{- end -}}
{{- else if not (and (or $values.serviceMonitor.enabled $values.autoscaling.scrapedOtherwise) $values.prometheusRule.enabled) -}}
{{- fail (printf "%s.autoscaling: an HPA reads what serviceMonitor.enabled collects (or autoscaling.scrapedOtherwise) and prometheusRule.enabled records" .role) -}}
{{- end -}}
{{- if and (eq (int (get .own "replicas")) 0) -}}
{{- fail (printf "%s.autoscaling: %s.replicas is 0, which switches the pool off" .role .role) -}}
{{- end -}}
{{- end }}

{{- define "disagg.checkGpus" -}}
{{- $gpu := .root.Values.gpu -}}
{{- $said := dig "limits" $gpu.resource "" .own.resources | default (dig "requests" $gpu.resource "" .own.resources) -}}
{{- $ranks := include "disagg.ranks" . -}}
{{- if and $gpu.enabled (ne (toString $said) "") (lt (int64 $said) (int64 $ranks)) -}}
{{- fail (printf "%s.resources.limits: %s is %v and %s.tp is %d (x server.dp x server.pp: %s ranks): each rank needs a GPU" .role $gpu.resource $said .role (int64 .own.tp) $ranks) -}}
{{- end -}}
{{- if and (not $gpu.enabled) (ne (toString $said) "") -}}
{{- fail (printf "%s.resources: %s is asked for and gpu.enabled is false, so nothing would use it" .role $gpu.resource) -}}
{{- end -}}
{{- end }}
