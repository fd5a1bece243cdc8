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
{{- include "disagg.checkVolumes" . -}}
{{- include "disagg.checkSelectors" (dict "at" (printf "%s.affinity" .role) "value" .own.affinity) -}}
{{- end }}

{{/* Volumes of a person's, and where they are mounted: beside what the chart has there. */}}
{{- define "disagg.checkVolumes" -}}
{{- $names := list "config" "tmp" "cache" "model" "api-keys" "jwks" "quotas" "tls" "shm" "kv" -}}
{{- $readOnly := list "/etc/disagg" "/etc/disagg-auth" "/etc/disagg-tls" "/model" -}}
{{- $paths := concat $readOnly (list "/tmp" "/var/cache/disagg" "/dev/shm" "/var/lib/disagg/kv") -}}
{{- $added := list -}}
{{- range $i, $each := .own.extraVolumes -}}
{{- $at := printf "%s.extraVolumes[%d]" $.role $i -}}
{{- if or (has $each.name $names) (has $each.name $added) -}}
{{- fail (printf "%s: there is a volume %s already, the chart's or yours; take another name" $at $each.name) -}}
{{- end -}}
{{- $added = append $added $each.name -}}
{{- if ne (len $each) 2 -}}
{{- fail (printf "%s: %s is %d kinds of volume; it must be one: configMap, secret, persistentVolumeClaim, emptyDir, hostPath, nfs, csi or image" $at $each.name (sub (len $each) 1)) -}}
{{- end -}}
{{- with dig "emptyDir" "sizeLimit" "" $each -}}
{{- include "disagg.checkSize" (dict "at" (printf "%s.emptyDir.sizeLimit is %s" $at .) "text" .) -}}
{{- end -}}
{{- if hasKey $each "image" -}}
{{- include "disagg.checkImageVolume" (dict "root" $.root "at" (printf "%s.image" $at)) -}}
{{- end -}}
{{- if regexMatch "(^|/)\\.\\.(/|$)" (dig "hostPath" "path" "" $each) -}}
{{- fail (printf "%s.hostPath.path: it may have no '..'; say the directory itself" $at) -}}
{{- end -}}
{{- range (dig "configMap" "items" list $each | default (dig "secret" "items" list $each)) -}}
{{- if regexMatch "^/|(^|/)\\.\\.(/|$)" .path -}}
{{- fail (printf "%s: the path %s of an item must be relative and have no '..'" $at .path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $taken := list -}}
{{- range $i, $each := .own.extraVolumeMounts -}}
{{- $at := printf "%s.extraVolumeMounts[%d]" $.role $i -}}
{{- if not (has $each.name $added) -}}
{{- fail (printf "%s: there is no volume %s in %s.extraVolumes" $at $each.name $.role) -}}
{{- end -}}
{{- if regexMatch "^/|(^|/)\\.\\.(/|$)" (get $each "subPath" | default "") -}}
{{- fail (printf "%s.subPath is %s: it must be relative and have no '..'" $at $each.subPath) -}}
{{- end -}}
{{- $path := trimSuffix "/" $each.mountPath -}}
{{- if or (eq $path "") (regexMatch "//|/\\.\\.?(/|$)" $path) -}}
{{- fail (printf "%s.mountPath is %s: it must be a plain absolute path below /" $at $each.mountPath) -}}
{{- end -}}
{{- if or (has $path $paths) (has $path $taken) -}}
{{- fail (printf "%s.mountPath is %s: something is mounted there already, the chart's or yours; take another path" $at $each.mountPath) -}}
{{- end -}}
{{- range $readOnly -}}
{{- if hasPrefix (printf "%s/" .) $path -}}
{{- fail (printf "%s.mountPath is %s: %s is the chart's, and read-only; take another path" $at $each.mountPath .) -}}
{{- end -}}
{{- end -}}
{{- $taken = append $taken $path -}}
{{- end -}}
{{- end }}

{{/* Volumes from images are there from Kubernetes 1.33 on. Whoever renders without a cluster and names no version has the one that
Helm was built for, which says nothing: 1.32 is that of Helm 3.17, and a cluster's version comes with the kinds that it has. (root, at) */}}
{{- define "disagg.checkImageVolume" -}}
{{- $there := .root.Capabilities -}}
{{- if semverCompare "<1.33.0-0" $there.KubeVersion.Version -}}
{{- $helm := semver $there.HelmVersion.Version -}}
{{- $unsaid := and (eq (int $helm.Major) 3) (eq $there.KubeVersion.Version (printf "v1.%d.0" (add $helm.Minor 15))) -}}
{{- if or (not $unsaid) ($there.APIVersions.Has "v1/Pod") -}}
{{- fail (printf "%s: volumes from images need Kubernetes 1.33 or later (and in 1.33 and 1.34 the feature gate ImageVolume), and this is %s; use a volume of another kind" .at $there.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Where a server writes what it did: the root is read-only, so only where something is mounted. What is mounted deeper counts.
(root, role, own, directory, at) */}}
{{- define "disagg.checkRecords" -}}
{{- $home := "/var/cache/disagg" -}}
{{- $directory := regexReplaceAll "^~(/|$)" .directory (printf "%s/" $home) -}}
{{- if not (hasPrefix "/" $directory) -}}{{- $directory = printf "%s/%s" $home $directory -}}{{- end -}}
{{- $directory = clean $directory -}}
{{- $writable := dict "/tmp" true $home true "/dev/shm" true "/var/lib/disagg/kv" (ne .root.Values.storage.pvc.claimName "") -}}
{{- $fixed := list "configMap" "secret" "image" -}}
{{- range $mount := .own.extraVolumeMounts -}}
{{- $may := not ($mount.readOnly | default false) -}}
{{- range $each := $.own.extraVolumes -}}
{{- if eq $each.name $mount.name -}}
{{- range $kind, $source := omit $each "name" -}}
{{- if or (has $kind $fixed) (get $source "readOnly") -}}{{- $may = false -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $writable (clean $mount.mountPath) $may -}}
{{- end -}}
{{- $in := "" -}}
{{- range $path, $_ := $writable -}}
{{- if and (hasPrefix (printf "%s/" $path) (printf "%s/" $directory)) (gt (len $path) (len $in)) -}}{{- $in = $path -}}{{- end -}}
{{- end -}}
{{- if not (and $in (get $writable $in)) -}}
{{- $why := ternary (printf "what is mounted at %s is read-only" $in) "the root of pods is read-only, and nothing is mounted there" (and (ne $in "") (ne $in "/var/lib/disagg/kv")) -}}
{{- fail (printf "%s is %s: %s; name a directory in a volume of %s.extraVolumes that %s.extraVolumeMounts mounts, or in /tmp or %s, which end with the pod" .at .directory $why .role .role $home) -}}
{{- end -}}
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
