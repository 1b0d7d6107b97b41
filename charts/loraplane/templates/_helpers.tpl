{{- define "loraplane.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* The longest suffix is "-operator-uninstall": 40 characters leave room for it in a label. */}}
{{- define "loraplane.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "loraplane.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "loraplane.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* (root, component) -> what selects a component's pods; never changes. */}}
{{- define "loraplane.selector" -}}
app.kubernetes.io/name: {{ include "loraplane.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "loraplane.labels" -}}
{{ include "loraplane.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: loraplane
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (root, component, name, namespace?, clusterWide?, annotations?, labels?) -> an object's metadata. */}}
{{- define "loraplane.metadata" -}}
name: {{ .name }}
{{- if not .clusterWide }}
namespace: {{ .namespace | default .root.Release.Namespace }}
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
priorityClassName: {{ . }}
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
  {{- include "loraplane.labels" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
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
    storage: {{ .size }}
{{- with .storageClassName }}
storageClassName: {{ ternary "" . (eq . "-") | quote }}
{{- end }}
{{- with .volumeName }}
volumeName: {{ . }}
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
