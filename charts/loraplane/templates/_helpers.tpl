{{- define "loraplane.name" -}}
{{- include "loraplane.short" (default .Chart.Name .Values.nameOverride) }}
{{- end }}

{{/* Of a name: 40 characters, which leave room for the longest suffix in a label. */}}
{{- define "loraplane.short" -}}
{{- regexReplaceAll "-+$" (trunc 40 .) "" }}
{{- end }}

{{- define "loraplane.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- include "loraplane.short" .Values.fullnameOverride }}
{{- else if contains (include "loraplane.name" .) .Release.Name }}
{{- include "loraplane.short" .Release.Name }}
{{- else }}
{{- include "loraplane.short" (printf "%s-%s" .Release.Name (include "loraplane.name" .)) }}
{{- end }}
{{- end }}

{{/* (root, component) -> what selects a component's pods; never changes. Names are quoted wherever they stand alone:
YAML takes 123 for a number, and no for a boolean. */}}
{{- define "loraplane.selector" -}}
app.kubernetes.io/name: {{ include "loraplane.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The same as it stands in an argument. */}}
{{- define "loraplane.selectorArgument" -}}
{{- $found := list }}
{{- range $name, $value := include "loraplane.selector" . | fromYaml }}
{{- $found = append $found (printf "%s=%s" $name $value) }}
{{- end }}
{{- join "," $found }}
{{- end }}

{{/* (root, component, more?): `more` wins over commonLabels; validate.yaml keeps both off the chart's own. */}}
{{- define "loraplane.labels" -}}
{{ include "loraplane.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: loraplane
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with merge (dict) (.more | default dict) .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (root, component, name, namespace?, clusterWide?, annotations?, labels?) -> an object's metadata. */}}
{{- define "loraplane.metadata" -}}
name: {{ .name | quote }}
{{- if not .clusterWide }}
namespace: {{ .namespace | default .root.Release.Namespace | quote }}
{{- end }}
labels:
  {{- include "loraplane.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "loraplane.poolNamespaces" -}}
{{- .Values.pools.namespaces | default (list .Release.Namespace) | uniq | toJson }}
{{- end }}

{{/* Of tenants alone: without pools. */}}
{{- define "loraplane.tenantNamespaces" -}}
{{- $pools := include "loraplane.poolNamespaces" . | fromJsonArray }}
{{- $found := list }}
{{- range .Values.tenants.namespaces | uniq }}
{{- if not (has . $pools) }}
{{- $found = append $found . }}
{{- end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* Not empty when objects are honoured outside of the release's namespace. */}}
{{- define "loraplane.reachesOut" -}}
{{- $found := concat (include "loraplane.poolNamespaces" . | fromJsonArray) (include "loraplane.tenantNamespaces" . | fromJsonArray) }}
{{- without $found .Release.Namespace | join " " }}
{{- end }}

{{/* --namespace and --pool-namespace, as the operator and the hook take them. */}}
{{- define "loraplane.namespaceArguments" -}}
{{- $pools := include "loraplane.poolNamespaces" . | fromJsonArray }}
{{- $tenants := include "loraplane.tenantNamespaces" . | fromJsonArray }}
{{- range concat $pools $tenants }}
- --namespace={{ . }}
{{- end }}
{{- if $tenants }}
{{- range $pools }}
- --pool-namespace={{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* (root, image) -> its reference. */}}
{{- define "loraplane.image" -}}
{{- $registry := .image.registry | default .root.Values.image.registry }}
{{- $name := ternary (printf "%s/%s" (trimSuffix "/" $registry) .image.repository) .image.repository (ne $registry "") }}
{{- if .image.digest }}
{{- printf "%s@%s" $name .image.digest }}
{{- else }}
{{- printf "%s:%s" $name (.image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/* (root, component) -> a component's account; "default" when an existing one is to be used and none is named. */}}
{{- define "loraplane.account" -}}
{{- $account := (index .root.Values .component).serviceAccount }}
{{- if $account.create }}
{{- $account.name | default (printf "%s-%s" (include "loraplane.fullname" .root) .component) }}
{{- else }}
{{- $account.name | default "default" }}
{{- end }}
{{- end }}

{{- define "loraplane.keysSecret" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" (include "loraplane.fullname" .)) }}
{{- end }}

{{- define "loraplane.databaseSecret" -}}
{{- ternary (printf "%s-postgres" (include "loraplane.fullname" .)) .Values.postgres.existingSecret .Values.postgres.enabled }}
{{- end }}

{{/* Empty without Valkey. */}}
{{- define "loraplane.valkeySecret" -}}
{{- ternary (printf "%s-valkey" (include "loraplane.fullname" .)) .Values.valkey.existingSecret .Values.valkey.enabled }}
{{- end }}

{{/*
Certificates of the authorities that external databases' certificates are of, where their Secrets hold them: a volume,
its mount, and the variable by which libpq finds its own.
*/}}
{{- define "loraplane.authorities" -}}
- name: authorities
  projected:
    defaultMode: 0440
    sources:
      {{- range $component, $secret := dict "postgres" (include "loraplane.databaseSecret" .) "valkey" (include "loraplane.valkeySecret" .) }}
      {{- if $secret }}
      - secret:
          name: {{ $secret | quote }}
          optional: true
          items:
            - { key: ca.crt, path: {{ $component }}.crt }
      {{- end }}
      {{- end }}
{{- end }}

{{- define "loraplane.authoritiesMount" -}}
- { name: authorities, mountPath: /var/run/authorities, readOnly: true }
{{- end }}

{{- define "loraplane.authoritiesEnv" -}}
- { name: PGSSLROOTCERT, value: /var/run/authorities/postgres.crt }
{{- end }}

{{/* The pods' side of the "restricted" Pod Security Standard; all of our images run as this user. */}}
{{- define "loraplane.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "loraplane.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}

{{/* (root, values, component): what every pod has beside its containers and volumes. */}}
{{- define "loraplane.pod" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
enableServiceLinks: false
{{ include "loraplane.podSecurity" . }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* (root, values, component, checksum?) -> metadata of a pod template. */}}
{{- define "loraplane.podMetadata" -}}
labels:
  {{- include "loraplane.labels" (merge (dict "more" .values.podLabels) .) | nindent 2 }}
{{- with merge (dict) (.values.podAnnotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* {name: value}: settings of a process as LORAPLANE_ variables, which are no secrets. */}}
{{- define "loraplane.settings" -}}
{{- range $name, $value := . }}
- name: LORAPLANE_{{ upper $name }}
  {{- /* YAML has read a whole number as a float: 1e+06 is no integer to those who read it. */}}
  value: {{ ternary (printf "%v" (int64 $value)) (toString $value) (and (kindIs "float64" $value) (eq (float64 (int64 $value)) $value)) | quote }}
{{- end }}
{{- end }}

{{/* (name, claim of: size, storageClassName, accessModes, volumeName) -> the spec of a claim. */}}
{{- define "loraplane.claimSpec" -}}
accessModes:
  {{- toYaml .accessModes | nindent 2 }}
resources:
  requests:
    storage: {{ .size | quote }}
{{- with .storageClassName }}
storageClassName: {{ ternary "" . (eq . "-") | quote }}
{{- end }}
{{- with .volumeName }}
volumeName: {{ . | quote }}
{{- end }}
{{- end }}

{{/* (secret, entry) of a Secret that this chart made once: its value when it is there, else empty. */}}
{{- define "loraplane.kept" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name }}
{{- index (($found | default dict).data | default dict) .entry | default "" }}
{{- end }}

{{/* 256 random bits as 64 hexadecimal digits. */}}
{{- define "loraplane.random" -}}
{{- randBytes 32 | sha256sum }}
{{- end }}
