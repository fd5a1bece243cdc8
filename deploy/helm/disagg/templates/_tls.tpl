{{/* Certificates: whose secrets they are in, where processes find them, and what does not go together. */}}

{{/* The secret of a role's certificate: (root, role); empty without TLS. Servers of all pools have one. */}}
{{- define "disagg.tlsSecret" -}}
{{- $tls := .root.Values.tls -}}
{{- $whose := ternary "router" "server" (eq .role "router") -}}
{{- if $tls.certManager.enabled -}}
{{- printf "%s-%s-tls" (include "disagg.fullname" .root) $whose -}}
{{- else -}}
{{- index $tls (printf "%sSecret" $whose) -}}
{{- end -}}
{{- end }}

{{/* The name in the certificate of servers, which are dialled by addresses that come and go. */}}
{{- define "disagg.serverName" -}}
{{- .Values.tls.serverName | default (printf "%s-servers.%s" (include "disagg.fullname" .) .Release.Namespace) -}}
{{- end }}

{{/* [tls] of a role as JSON; {} without: (root, role). */}}
{{- define "disagg.tls" -}}
{{- $tls := dict -}}
{{- if include "disagg.tlsSecret" . -}}
{{- $at := "/etc/disagg-tls" -}}
{{- $tls = dict "cert" (printf "%s/tls.crt" $at) "key" (printf "%s/tls.key" $at) "ca" (printf "%s/ca.crt" $at) "server_name" (include "disagg.serverName" .root) -}}
{{- end -}}
{{- toJson $tls -}}
{{- end }}

{{/* (root, role) */}}
{{- define "disagg.tlsMount" -}}
{{- if include "disagg.tlsSecret" . }}
- {name: tls, mountPath: /etc/disagg-tls, readOnly: true}
{{- end }}
{{- end }}

{{/* (root, role); only: the one file of the secret that is mounted, or all. */}}
{{- define "disagg.tlsVolume" -}}
{{- with include "disagg.tlsSecret" . }}
- name: tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 288
    {{- with $.only }}
    items: [{key: {{ . | quote }}, path: {{ . | quote }}}]
    {{- end }}
{{- end }}
{{- end }}

{{/* What Kubernetes calls the protocol of a gRPC port: (root, role). */}}
{{- define "disagg.grpcProtocol" -}}
{{- ternary "https" "kubernetes.io/h2c" (ne (include "disagg.tlsSecret" .) "") -}}
{{- end }}

{{- define "disagg.checkTls" -}}
{{- with .Values.tls -}}
{{- $manager := .certManager -}}
{{- if and $manager.enabled (or .routerSecret .serverSecret) -}}
{{- fail "tls.certManager.enabled: tls.routerSecret or tls.serverSecret names a secret that is there, and cert-manager would make another; give one of the two" -}}
{{- end -}}
{{- if and .routerSecret (not .serverSecret) -}}
{{- fail "tls.serverSecret: tls.routerSecret is set, and routers show certificates only to servers that have one, too" -}}
{{- end -}}
{{- if and .serverSecret (not .routerSecret) -}}
{{- fail "tls.routerSecret: tls.serverSecret is set, and servers let in only routers that have a certificate, too" -}}
{{- end -}}
{{- if and .serverName (not (or $manager.enabled .serverSecret)) -}}
{{- fail "tls.serverName: it is the name in the certificate of servers, and there is none: see tls.certManager and tls.serverSecret" -}}
{{- end -}}
{{- if and (not $manager.enabled) (or $manager.issuer.name $manager.dnsNames) -}}
{{- fail "tls.certManager.enabled is false: tls.certManager.issuer and tls.certManager.dnsNames are used with it only" -}}
{{- end -}}
{{- if and (not $manager.issuer.name) (or (ne $manager.issuer.kind "Issuer") (ne $manager.issuer.group "cert-manager.io")) -}}
{{- fail (printf "tls.certManager.issuer.name: it is empty, so nothing has the kind %s of %s: name that issuer, or leave kind and group out, and the chart makes one" $manager.issuer.kind $manager.issuer.group) -}}
{{- end -}}
{{- if and (eq $manager.issuer.group "cert-manager.io") (not (has $manager.issuer.kind (list "Issuer" "ClusterIssuer"))) -}}
{{- fail (printf "tls.certManager.issuer.kind is %s: of the group cert-manager.io it may be Issuer or ClusterIssuer" $manager.issuer.kind) -}}
{{- end -}}
{{- if le (int64 (trimSuffix "h" $manager.duration)) (int64 (trimSuffix "h" $manager.renewBefore)) -}}
{{- fail (printf "tls.certManager.renewBefore is %s: it must be less than tls.certManager.duration = %s" $manager.renewBefore $manager.duration) -}}
{{- end -}}
{{- end -}}
{{- end }}
