{{/* What the pods of all roles have in common. */}}

{{- define "disagg.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* (rdma): pinned memory is what RDMA needs a capability for, and nothing else does. */}}
{{- define "disagg.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- if .rdma }}
  add: [IPC_LOCK]
{{- end }}
{{- end }}

{{/* Probes of a role: (port, secure, startupSeconds, ready). The kubelet shows no certificate, and neither port asks for one. A process
that answers /live lives, also while it loads for minutes; one that answers `ready` with 200 can serve. */}}
{{- define "disagg.probes" -}}
startupProbe:
  httpGet: {path: /live, port: {{ .port }}{{ if .secure }}, scheme: HTTPS{{ end }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div .startupSeconds 5) }}
readinessProbe:
  httpGet: {path: {{ quote .ready }}, port: {{ .port }}{{ if .secure }}, scheme: HTTPS{{ end }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /live, port: {{ .port }}{{ if .secure }}, scheme: HTTPS{{ end }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}

{{/* The environment of every process, and a role's own: (role, extraEnv). */}}
{{- define "disagg.env" -}}
- {name: HOME, value: /var/cache/disagg}
- {name: TMPDIR, value: /tmp}
{{- if eq .role "router" }}
- {name: DISAGG__ROUTER__NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
{{- else }}
- {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
- {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
- {name: DISAGG__SERVER__NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: DISAGG__SERVER__POD, value: $(POD_NAMESPACE)/$(DISAGG__SERVER__NAME)/$(POD_UID)}
- {name: DISAGG__SERVER__ADVERTISE_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- end }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* How many pods, empty where nothing is to be said: (root, role, own, kind). With an autoscaler those that there are: a number that
was in the release and is left out would become 1. Outside of a cluster (helm template) they are not known. */}}
{{- define "disagg.replicas" -}}
{{- if not .own.autoscaling.enabled -}}
{{ .own.replicas }}
{{- else -}}
{{- $name := printf "%s-%s" (include "disagg.fullname" .root) .role -}}
{{- $live := lookup "apps/v1" .kind .root.Release.Namespace $name -}}
{{- dig "spec" "replicas" "" ($live | default dict) -}}
{{- end -}}
{{- end }}

{{- define "disagg.mounts" -}}
- {name: config, mountPath: /etc/disagg, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/disagg}
{{- if include "disagg.modelMounted" . }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end }}

{{/* Secrets of routers, and of whoever asks them. All are read again when they change. */}}
{{- define "disagg.authMounts" -}}
{{- if .Values.auth.apiKeys.secretName }}
- {name: api-keys, mountPath: /etc/disagg-auth/api-keys, readOnly: true}
{{- end }}
{{- if .Values.auth.jwks.secretName }}
- {name: jwks, mountPath: /etc/disagg-auth/jwks, readOnly: true}
{{- end }}
{{- if .Values.auth.quotas.secretName }}
- {name: quotas, mountPath: /etc/disagg-auth/quotas, readOnly: true}
{{- end }}
{{- end }}

{{- define "disagg.authVolumes" -}}
{{- with .Values.auth.apiKeys.secretName }}
- name: api-keys
  secret: {secretName: {{ . | quote }}, defaultMode: 288}
{{- end }}
{{- with .Values.auth.jwks.secretName }}
- name: jwks
  secret: {secretName: {{ . | quote }}, defaultMode: 288}
{{- end }}
{{- with .Values.auth.quotas.secretName }}
- name: quotas
  secret: {secretName: {{ . | quote }}, defaultMode: 288}
{{- end }}
{{- end }}

{{/* (root, role) */}}
{{- define "disagg.volumes" -}}
- name: config
  configMap: {name: "{{ include "disagg.fullname" .root }}-{{ .role }}"}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: cache
  emptyDir: {sizeLimit: {{ (index .root.Values .role).cacheSize | default "2Gi" | quote }}}
{{- with .root.Values.model }}
{{- if .pvc.claimName }}
- name: model
  persistentVolumeClaim: {claimName: {{ .pvc.claimName | quote }}, readOnly: true}
{{- else if .image.reference }}
- name: model
  image: {reference: {{ .image.reference | quote }}, pullPolicy: {{ .image.pullPolicy }}}
{{- else if .hostPath.path }}
- name: model
  hostPath: {path: {{ .hostPath.path | quote }}, type: Directory}
{{- end }}
{{- end }}
{{- end }}

{{/* Quantities as strings, whatever they were: extended resources with slashes too. */}}
{{- define "disagg.quantities" -}}
{{- range $name, $amount := . }}
{{ $name | quote }}: {{ include "disagg.quantity" $amount | quote }}
{{- end -}}
{{- end }}

{{- define "disagg.quantity" -}}
{{- if and (kindIs "float64" .) (eq (floor .) (float64 .)) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- end }}

{{- define "disagg.resources" -}}
{{- range $kind, $amounts := . }}
{{- if $amounts }}
{{ $kind }}:
  {{- include "disagg.quantities" $amounts | trim | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* Pods of one role on as many nodes as there are, and routers in as many zones: (root, role). */}}
{{- define "disagg.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "disagg.selector" . | nindent 6 }}
{{- if eq .role "router" }}
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "disagg.selector" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* The top of every pod's spec: (root, role, own). */}}
{{- define "disagg.podTop" -}}
{{- if eq .role "router" }}
serviceAccountName: {{ include "disagg.routerAccount" .root | quote }}
automountServiceAccountToken: {{ eq .root.Values.discovery "kubernetes" }}
{{- else }}
serviceAccountName: {{ include "disagg.serviceAccount" .root | quote }}
automountServiceAccountToken: false
{{- end }}
enableServiceLinks: false
securityContext: {{- include "disagg.podSecurity" . | nindent 2 }}
terminationGracePeriodSeconds: {{ .own.terminationGracePeriodSeconds }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The top of every container: (root, role, own). */}}
{{- define "disagg.containerTop" -}}
name: disagg
image: {{ include "disagg.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [disagg, {{ .role }}]
args: [--config, /etc/disagg/disagg.toml]
env: {{- include "disagg.env" (dict "role" .role "extraEnv" .own.extraEnv) | nindent 2 }}
{{- if .own.preStopSeconds }}
lifecycle: {preStop: {sleep: {seconds: {{ .own.preStopSeconds }}}}}
{{- end }}
{{- end }}
