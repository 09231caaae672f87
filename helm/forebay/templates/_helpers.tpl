{{- define "forebay.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "forebay.selector" -}}
app.kubernetes.io/name: forebay
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "forebay.labels" -}}
{{ include "forebay.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "forebay.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end }}

{{/* Where Ray's head answers, whatever its pod is called. */}}
{{- define "forebay.dashboard" -}}
http://{{ include "forebay.fullname" . }}-head-svc.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:8265
{{- end }}

{{/* The component whose pods controllers run in. */}}
{{- define "forebay.home" -}}
{{ ternary "controller" "head" (gt (int .Values.controllers.replicas) 0) }}
{{- end -}}

{{/* Whether any model has `scale`. */}}
{{- define "forebay.scales" -}}
{{- range .Values.models }}{{ if .scale }}true{{ end }}{{ end -}}
{{- end }}

{{/* Seconds that Ray is given, on SIGTERM, to have what runs on a node leave it: for another in its place, and for what
Serve then gives it, drain.seconds and ten (deployments/app.py). */}}
{{- define "forebay.leaveSeconds" -}}
{{ add (int .Values.drain.seconds) 10 (int .Values.drain.replaceSeconds) }}
{{- end }}

{{/* The Ray resource that one replica of a model takes. */}}
{{- define "forebay.modelResource" -}}
forebay_model_{{ .name }}
{{- end }}

{{/* What cannot be, in words. values.schema.json has said what is no key, or of another kind. */}}
{{- define "forebay.check" -}}
{{- $v := .Values }}
{{- range $key, $name := dict "image.repository" $v.image.repository "secrets.rayToken.name" $v.secrets.rayToken.name "secrets.cluster.name" $v.secrets.cluster.name "modelStore.claimName" $v.modelStore.claimName }}
{{- if not $name }}{{ fail (printf "%s must be given" $key) }}{{ end }}
{{- end }}
{{- if not (or $v.image.tag $v.image.digest) }}{{ fail "image.tag or image.digest must be given" }}{{ end }}
{{- if and (eq $v.router.auth "keys") (not $v.secrets.keys.name) }}
{{- fail "secrets.keys.name must be given, or router.auth: none, which serves whoever reaches the routers" }}{{ end }}
{{- if not $v.models }}{{ fail "models must name at least one" }}{{ end }}
{{- if lt (int $v.router.drainNoticeSeconds) (mul 3 (int $v.router.readinessPeriodSeconds)) }}
{{- fail (printf "router.drainNoticeSeconds (%d) must be at least three times router.readinessPeriodSeconds (%d)" (int $v.router.drainNoticeSeconds) (int $v.router.readinessPeriodSeconds)) }}{{ end }}
{{- if ge (int $v.router.drainNoticeSeconds) (int $v.drain.seconds) }}
{{- fail (printf "drain.seconds (%d) must be longer than router.drainNoticeSeconds (%d), which is a part of it" (int $v.drain.seconds) (int $v.router.drainNoticeSeconds)) }}{{ end }}
{{- if and (gt (int $v.router.replicas) 1) (ge (int $v.router.minAvailable) (int $v.router.replicas)) }}
{{- fail (printf "router.minAvailable (%d) must be below router.replicas (%d), or no node with one of them could ever be drained" (int $v.router.minAvailable) (int $v.router.replicas)) }}{{ end }}
{{- if and $v.autoscaling.enabled (not (include "forebay.scales" .)) }}
{{- fail "autoscaling.enabled: no entry of models has scale, so there is nothing to scale" }}{{ end }}
{{- range $key, $port := dict "router.port" $v.router.port "monitoring.ports.model" $v.monitoring.ports.model "monitoring.ports.controller" $v.monitoring.ports.controller }}
{{- if has (int $port) (list 6379 8080 8265 10001 52365) }}{{ fail (printf "%s (%d) is a port of Ray's" $key (int $port)) }}{{ end }}
{{- end }}
{{- if eq (int $v.monitoring.ports.model) (int $v.monitoring.ports.controller) }}
{{- fail (printf "monitoring.ports.model and monitoring.ports.controller are both %d; a small cluster has them in one pod" (int $v.monitoring.ports.model)) }}{{ end }}
{{- $names := dict }}
{{- range $n, $m := $v.models }}
{{- $at := printf "models[%d]" $n }}
{{- if hasKey $names $m.name }}{{ fail (printf "%s.name: %s names two models" $at $m.name) }}{{ end }}
{{- $_ := set $names $m.name true }}
{{- if not (hasPrefix (printf "%s/" $v.modelStore.mountPath) $m.model) }}
{{- fail (printf "%s.model: %s must be a folder below modelStore.mountPath (%s)" $at $m.model $v.modelStore.mountPath) }}{{ end }}
{{- $fewest := int $m.replicas }}
{{- with $m.scale }}
{{- if or (gt (int $m.replicas) (int .max)) (lt (int $m.replicas) (max 1 (int (dig "min" 1 .)))) }}
{{- fail (printf "%s.replicas (%d) must be between scale.min (%d), one at least, and scale.max (%d)" $at (int $m.replicas) (int (dig "min" 1 .)) (int .max)) }}{{ end }}
{{- $fewest = ternary (int (dig "min" 1 .)) (int .max) $v.autoscaling.enabled }}
{{- end }}
{{- with $m.zones }}
{{- range $key, $count := dict "replicas" (int $m.replicas) "scale.min" (ternary (int (dig "scale" "min" 1 $m)) 0 (hasKey $m "scale")) "scale.max" (int (dig "scale" "max" 0 $m)) }}
{{- if mod $count (len $m.zones) }}{{ fail (printf "%s.%s (%d) must be a multiple of its %d zones, which have equal parts" $at $key $count (len $m.zones)) }}{{ end }}
{{- end }}
{{- end }}
{{- if and $m.minAvailable (ge (int $m.minAvailable) $fewest) }}
{{- fail (printf "%s.minAvailable (%d) must be below the fewest pods that it has (%d), or no node with one of them could ever be drained" $at (int $m.minAvailable) $fewest) }}{{ end }}
{{- end }}
{{- end }}

{{/* The arguments of deployments.serve_app:build_app. */}}
{{- define "forebay.args" -}}
{{- $v := .Values }}
{{- $models := list }}
{{- range $v.models }}
{{- $gpu := .gpu | default dict }}
{{- $model := dict "model" .model "served_name" (.servedName | default .name) "replicas" .replicas "gpus_per_replica" (dig "count" 1 $gpu) "resource" (include "forebay.modelResource" .) }}
{{- with .aliases }}{{ $_ := set $model "aliases" . }}{{ end }}
{{- with .engine }}{{ $_ := set $model "engine" . }}{{ end }}
{{- with .scale }}{{ $_ := set $model "scale" . }}{{ end }}
{{- with $gpu.type }}{{ $_ := set $model "accelerator_type" . }}{{ end }}
{{- $models = append $models $model }}
{{- end }}
{{- $router := dict "host" "0.0.0.0" "port" $v.router.port "auth" $v.router.auth "drain_notice_s" $v.router.drainNoticeSeconds "open_metrics" $v.monitoring.podMonitor.enabled }}
{{- if eq $v.router.auth "keys" }}
{{- $_ := set $router "keys_file" (printf "/run/forebay/keys/%s" $v.secrets.keys.file) }}
{{- $_ := set $router "keys_pepper_file" (printf "/run/forebay/keys/%s" $v.secrets.keys.pepper) }}
{{- end }}
{{- $profile := dict "listen" "node" "models" $models "routers" $v.router.replicas "router_resource" "forebay_router" "controller_resource" "forebay_controller" }}
{{- $_ := set $profile "router" (merge $router $v.profile.router) }}
{{- $_ := set $profile "control" (merge (dict "standby" (eq (int $v.controllers.replicas) 2)) $v.profile.control) }}
{{- $_ := set $profile "health" (merge (dict "start_timeout_s" $v.startup.modelLoadSeconds "drain_timeout_s" $v.drain.seconds) $v.profile.health) }}
{{- $_ := set $profile "metrics" (dict "replica_port" $v.monitoring.ports.model "controller_port" $v.monitoring.ports.controller) }}
{{- with $v.profile.transport }}{{ $_ := set $profile "transport" . }}{{ end }}
{{- if $v.kubernetesAccess.enabled }}
{{- $_ := set $profile "kubernetes" (merge (dict "namespace" .Release.Namespace "name" (include "forebay.fullname" .)) $v.profile.kubernetes) }}
{{- end }}
{{- $args := dict "profile" $profile "secret_path" (printf "/run/forebay/cluster/%s" $v.secrets.cluster.key) }}
{{- if include "forebay.scales" . }}
{{- $_ := set $args "dashboard_url" (include "forebay.dashboard" .) }}
{{- $_ := set $args "token_path" "/run/forebay/ray/auth_token" }}
{{- end }}
{{- toPrettyJson $args }}
{{- end }}

{{/* In JSON whole numbers stay whole: Helm 3 writes a million as 1e+06 in YAML, which is a word to Python. */}}
{{- define "forebay.serveConfig" -}}
proxy_location: Disabled
applications:
  - name: forebay
    route_prefix: null
    import_path: deployments.serve_app:build_app
    external_scaler_enabled: {{ not (empty (include "forebay.scales" .)) }}
    args: {{- include "forebay.args" . | nindent 6 }}
{{- end }}
