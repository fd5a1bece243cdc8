{{/* Recorded figures and alerts. docs/kubernetes.md says of each alert what to do. */}}
{{- define "disagg.rules" -}}
{{- $of := printf "namespace=%q,app_kubernetes_io_instance=%q" .Release.Namespace .Release.Name -}}
{{- $by := "namespace, pod, app_kubernetes_io_instance, disagg_role" -}}
- name: disagg-recorded
  rules:
    - record: disagg_kv_used_ratio
      expr: >-
        sum by ({{ $by }}) (disagg_kv_large_pages{ {{- $of }},state="used"})
        / sum by ({{ $by }}) (disagg_kv_large_pages{ {{- $of }}} > 0)
- name: disagg-alerts
  rules:
    - alert: DisaggNoRouter
      expr: absent(up{ {{- $of }},disagg_role="router"} == 1)
      for: 2m
      labels: {severity: critical}
      annotations: {summary: No router answers; nobody is served}
    {{- range $role := include "disagg.pools" . | fromJsonArray }}
    {{- if gt (int (index $.Values $role).replicas) 0 }}
    - alert: Disagg{{ title $role }}PoolDown
      expr: absent(up{ {{- $of }},disagg_role={{ quote $role }}} == 1)
      for: 2m
      labels: {severity: critical}
      annotations: {summary: No {{ $role }} server answers}
    {{- end }}
    {{- end }}
    - alert: DisaggRequestsFail
      expr: >-
        sum(rate(disagg_router_requests_total{ {{- $of }},outcome=~"overloaded|shed|no_compatible_peer|unavailable|retries_spent|deadline|failed"}[5m]))
        / sum(rate(disagg_router_requests_total{ {{- $of }}}[5m]) > 0) > 0.01
      for: 5m
      labels: {severity: critical}
      annotations: {summary: More than 1% of the requests fail or are turned away}
    - alert: DisaggFirstTokenLate
      expr: >-
        histogram_quantile(0.95, sum by (le) (rate(disagg_router_ttft_seconds_bucket{ {{- $of }}}[5m]))) > {{ .Values.prometheusRule.ttftSeconds }}
      for: 10m
      labels: {severity: warning}
      annotations: {summary: 'The 95th percentile of time to first token is above {{ .Values.prometheusRule.ttftSeconds }} s'}
    - alert: DisaggTokensLate
      expr: >-
        histogram_quantile(0.95, sum by (le) (rate(disagg_router_itl_seconds_bucket{ {{- $of }}}[5m]))) > {{ .Values.prometheusRule.itlSeconds }}
      for: 10m
      labels: {severity: warning}
      annotations: {summary: 'The 95th percentile of inter-token latency is above {{ .Values.prometheusRule.itlSeconds }} s'}
    - alert: DisaggServersLost
      expr: sum by (server) (increase(disagg_router_servers_lost_total{ {{- $of }}}[15m])) > 3
      labels: {severity: warning}
      annotations: {summary: 'Server {{ "{{ $labels.server }}" }} is lost again and again'}
    - alert: DisaggModelMismatch
      expr: max(disagg_router_servers_mismatched{ {{- $of }}}) > 0
      for: 10m
      labels: {severity: warning}
      annotations: {summary: Servers have other model files than the routers and get no requests}
    - alert: DisaggModelChanged
      expr: sum by (pod) (increase(disagg_model_changes_total{ {{- $of }}}[30m])) > 0
      labels: {severity: warning}
      annotations: {summary: 'The workers of {{ "{{ $labels.pod }}" }} came up with another model than before'}
    - alert: DisaggKvDamaged
      expr: sum by (pod) (increase(disagg_checksum_failures_total{ {{- $of }}}[30m])) > 0
      labels: {severity: warning}
      annotations: {summary: 'KV arrived damaged at {{ "{{ $labels.pod }}" }}'}
    - alert: DisaggTransfersFail
      expr: sum by (pod, reason) (increase(disagg_transfer_failures_total{ {{- $of }}}[15m])) > 5
      labels: {severity: warning}
      annotations: {summary: 'Transfers at {{ "{{ $labels.pod }}" }} are given up: {{ "{{ $labels.reason }}" }}'}
    - alert: DisaggArenaQuarantined
      expr: max by (pod) (disagg_arena_bytes{ {{- $of }},state="quarantined"}) > 0
      for: 15m
      labels: {severity: warning}
      annotations: {summary: 'Staging memory of {{ "{{ $labels.pod }}" }} waits for a lost peer'}
    - alert: DisaggDecodeOutOfPages
      expr: sum by (pod) (rate(disagg_preemptions_total{ {{- $of }}}[10m])) > 0.1
      for: 10m
      labels: {severity: warning}
      annotations: {summary: 'Answers on {{ "{{ $labels.pod }}" }} give way for want of KV memory'}
    - alert: DisaggStorageDown
      expr: min by (pod) (disagg_store_up{ {{- $of }}}) == 0
      for: 10m
      labels: {severity: warning}
      annotations: {summary: 'Storage for KV fails for {{ "{{ $labels.pod }}" }}, which leaves it alone'}
    - alert: DisaggLoopStalls
      expr: sum by (pod) (increase(disagg_loop_alarms_total{ {{- $of }}}[15m])) > 5
      labels: {severity: warning}
      annotations: {summary: 'The event loop of {{ "{{ $labels.pod }}" }} stands still for 250 ms or more'}
    - alert: DisaggCertificateExpires
      expr: >-
        disagg_tls_certificate_expires_in_seconds{ {{- $of }}} < 604800
        and disagg_tls_certificate_expires_in_seconds{ {{- $of }}} < 0.25 * disagg_tls_certificate_life_seconds{ {{- $of }}}
      for: 10m
      labels: {severity: critical}
      annotations: {summary: 'The certificate of {{ "{{ $labels.pod }}" }}, or what it rests on, expires within a week'}
    - alert: DisaggContradictions
      expr: sum by (pod) (increase(disagg_router_contradictions_total{ {{- $of }}}[1h])) > 0
      labels: {severity: warning}
      annotations: {summary: A replayed request got another token than the client has}
{{- end }}
