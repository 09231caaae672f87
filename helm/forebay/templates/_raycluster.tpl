{{/* What a Ray node has to offer, as `ray start --resources` takes it, in the quotes that KubeRay's command needs. */}}
{{- define "forebay.offers" -}}
{{ printf "'%s'" (toJson .) | quote }}
{{- end }}

{{/* The spec of the RayCluster. */}}
{{- define "forebay.rayCluster" -}}
{{- $root := . }}
{{- $v := .Values }}
{{- $access := $v.kubernetesAccess.enabled }}
{{- $store := printf "%d" (int64 $v.ray.objectStoreBytes) }}
rayVersion: {{ $v.rayVersion }}
authOptions: {mode: token, secretName: {{ $v.secrets.rayToken.name }}}
{{- if $v.gcs.redis.address }}
gcsFaultToleranceOptions:
  redisAddress: {{ $v.gcs.redis.address }}
  {{- if $v.gcs.redis.passwordSecret.name }}
  redisPassword: {valueFrom: {secretKeyRef: {name: {{ $v.gcs.redis.passwordSecret.name }}, key: {{ $v.gcs.redis.passwordSecret.key }}}}}
  {{- end }}
{{- end }}
{{- if $v.autoscaling.enabled }}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  upscalingMode: Default
  idleTimeoutSeconds: {{ $v.autoscaling.idleTimeoutSeconds | int }}
  resources: {{- toYaml $v.autoscaling.resources | nindent 4 }}
  securityContext: {{- include "forebay.containerSecurity" . | nindent 4 }}
  # KubeRay adds the token.
  env:
    - {name: HOME, value: /tmp/home}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
{{- end }}
headGroupSpec:
  # Never of another kind: Ray's ports are for this release alone.
  serviceType: ClusterIP
  rayStartParams:
    num-cpus: "0"
    num-gpus: "0"
    object-store-memory: {{ $store | quote }}
    {{- if eq (int $v.controllers.replicas) 0 }}
    resources: {{ include "forebay.offers" (dict "forebay_controller" 1) }}
    {{- end }}
  template:
    {{- include "forebay.rayPod" (dict "root" . "component" "head" "resources" $v.head.resources "nodeSelector" $v.head.nodeSelector "tolerations" $v.head.tolerations "access" (or $v.autoscaling.enabled (and $access (eq (int $v.controllers.replicas) 0)))) | nindent 4 }}
workerGroupSpecs:
  - groupName: router
    replicas: {{ $v.router.replicas | int }}
    minReplicas: {{ $v.router.replicas | int }}
    maxReplicas: {{ $v.router.replicas | int }}
    rayStartParams:
      num-cpus: "0"
      num-gpus: "0"
      object-store-memory: {{ $store | quote }}
      resources: {{ include "forebay.offers" (dict "forebay_router" 1) }}
    template:
      {{- $apart := include "forebay.apart" (dict "root" . "component" "router" "how" $v.router.antiAffinity) | fromYaml }}
      {{- include "forebay.rayPod" (dict "root" . "component" "router" "resources" $v.router.resources "nodeSelector" $v.router.nodeSelector "tolerations" $v.router.tolerations "affinity" $apart "access" false) | nindent 6 }}
  {{- if $v.controllers.replicas }}
  - groupName: controller
    replicas: {{ $v.controllers.replicas | int }}
    minReplicas: {{ $v.controllers.replicas | int }}
    maxReplicas: {{ $v.controllers.replicas | int }}
    rayStartParams:
      num-cpus: "0"
      num-gpus: "0"
      object-store-memory: {{ $store | quote }}
      resources: {{ include "forebay.offers" (dict "forebay_controller" 1) }}
    template:
      {{- $apart := include "forebay.apart" (dict "root" . "component" "controller" "how" "preferred") | fromYaml }}
      {{- include "forebay.rayPod" (dict "root" . "component" "controller" "resources" $v.controllers.resources "nodeSelector" $v.controllers.nodeSelector "tolerations" $v.controllers.tolerations "affinity" $apart "access" $access) | nindent 6 }}
  {{- end }}
  {{- range $m := $v.models }}
  {{- $gpu := merge (dict) ($m.gpu | default dict) (dict "count" 1 "resource" "nvidia.com/gpu" "type" "") }}
  {{- $gpus := int $gpu.count }}
  {{- $offers := dict (include "forebay.modelResource" $m) 1 }}
  {{- if and $gpus $gpu.type }}{{ $_ := set $offers (printf "accelerator_type:%s" $gpu.type) 1 }}{{ end }}
  {{- $resources := deepCopy ($m.resources | default dict) }}
  {{- if $gpus }}
  {{- $_ := set $resources "limits" (merge (dict $gpu.resource $gpus) ($resources.limits | default dict)) }}
  {{- end }}
  {{- $parts := max 1 (len ($m.zones | default list)) | int }}
  {{- $max := div (int (dig "scale" "max" $m.replicas $m)) $parts }}
  {{- $min := ternary (div (int (dig "scale" "min" 1 $m)) $parts) $max (and (hasKey $m "scale") $v.autoscaling.enabled) }}
  {{- $now := ternary (div (int $m.replicas) $parts) $max $v.autoscaling.enabled }}
  {{- range $zone := $m.zones | default (list "") }}
  - groupName: model-{{ $m.name }}{{ with $zone }}-{{ . }}{{ end }}
    replicas: {{ $now }}
    minReplicas: {{ $min }}
    maxReplicas: {{ $max }}
    rayStartParams:
      num-cpus: "0"
      num-gpus: {{ $gpus | quote }}
      object-store-memory: {{ $store | quote }}
      resources: {{ include "forebay.offers" $offers }}
    template:
      {{- $where := deepCopy ($m.nodeSelector | default dict) }}
      {{- with $zone }}{{ $_ := set $where "topology.kubernetes.io/zone" . }}{{ end }}
      {{- include "forebay.rayPod" (dict "root" $root "component" "model" "model" $m.name "gpus" $gpus "zone" $zone "resources" $resources "nodeSelector" $where "tolerations" $m.tolerations "affinity" $m.affinity "access" false) | nindent 6 }}
  {{- end }}
  {{- end }}
{{- end }}
