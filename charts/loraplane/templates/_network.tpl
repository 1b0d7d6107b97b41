{{/* (root, component, namespaces?): pods of a component as a peer. Without namespaces: those of the policy's own. */}}
{{- define "loraplane.peer" -}}
{{- if .namespaces }}
{{- range .namespaces }}
- namespaceSelector: { matchLabels: { kubernetes.io/metadata.name: {{ . | quote }} } }
  podSelector:
    matchLabels:
      {{- include "loraplane.selector" $ | nindent 6 }}
{{- end }}
{{- else }}
- podSelector:
    matchLabels:
      {{- include "loraplane.selector" . | nindent 6 }}
{{- end }}
{{- end }}

{{- define "loraplane.dnsEgress" -}}
- to:
    {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  ports:
    - { protocol: UDP, port: 53 }
    - { protocol: TCP, port: 53 }
{{- end }}

{{- define "loraplane.apiServerEgress" -}}
- to:
    {{- range .Values.networkPolicy.apiServer.cidrs }}
    - ipBlock: { cidr: {{ . | quote }} }
    {{- end }}
  ports:
    {{- range .Values.networkPolicy.apiServer.ports }}
    - { protocol: TCP, port: {{ . }} }
    {{- end }}
{{- end }}

{{/* To our own databases, and to where external ones are. */}}
{{- define "loraplane.databaseEgress" -}}
{{- range $component, $port := dict "postgres" 5432 "valkey" 6379 }}
{{- if (index $.Values $component).enabled }}
- to:
    {{- include "loraplane.peer" (dict "root" $ "component" $component) | nindent 4 }}
  ports:
    - { protocol: TCP, port: {{ $port }} }
{{- end }}
{{- end }}
{{- if or (not .Values.postgres.enabled) .Values.valkey.existingSecret }}
- ports:
    {{- range .Values.networkPolicy.databases.ports }}
    - { protocol: TCP, port: {{ . }} }
    {{- end }}
  {{- with .Values.networkPolicy.databases.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
