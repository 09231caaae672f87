{{/* What every pod of the release is held to: the profile "restricted" of Pod Security, and a root that cannot be written. */}}
{{- define "forebay.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.image.uid }}
runAsGroup: {{ .Values.image.uid }}
fsGroup: {{ .Values.image.uid }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "forebay.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "forebay.tokenEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.secrets.rayToken.name }}, key: auth_token}}
{{- end }}

{{/* A pod of the Ray cluster.
Takes: root, component (head, router, controller, model), and where they differ: gpus, zone, resources (a Ray container's),
nodeSelector, tolerations, affinity, access (to Kubernetes). */}}
{{- define "forebay.rayPod" -}}
{{- $root := .root }}
{{- $v := $root.Values }}
{{- $head := eq .component "head" }}
{{- $alive := list "python" "-m" "deployments.probe" "http://127.0.0.1:52365/api/local_raylet_healthz" }}
{{- if $head }}{{ $alive = append $alive "http://127.0.0.1:8265/api/gcs_healthz" }}{{ end }}
{{- $ready := $alive }}
{{- if eq .component "router" }}{{ $ready = append $alive (printf "http://127.0.0.1:%d/ready" (int $v.router.port)) }}{{ end }}
metadata:
  labels:
    {{- include "forebay.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with .model }}
    forebay/model: {{ . }}
    {{- end }}
    {{- if eq .component "router" }}
    # Taken away, this one gets nothing new from the balancer and serves on what it has.
    forebay/balanced: "true"
    {{- end }}
  annotations:
    # The command below is run as it stands; KubeRay's own would leave a shell between the kubelet and Ray, which hears no
    # SIGTERM.
    ray.io/overwrite-container-cmd: "true"
spec:
  serviceAccountName: {{ include "forebay.fullname" $root }}-{{ ternary .component "worker" (or $head (eq .component "controller")) }}
  automountServiceAccountToken: {{ .access }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (int (include "forebay.leaveSeconds" $root)) (ternary 90 30 $head) }}
  securityContext: {{- include "forebay.podSecurity" $root | nindent 4 }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ ternary "head" "worker" $head }}
      image: {{ include "forebay.image" $root | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      command: [/bin/bash, -c, --]
      args: ['ulimit -n 65536; eval "exec $KUBERAY_GEN_RAY_START_CMD"']
      securityContext: {{- include "forebay.containerSecurity" $root | nindent 8 }}
      {{- with .resources }}
      resources: {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        {{- include "forebay.tokenEnv" $root | nindent 8 }}
        - {name: RAY_health_check_period_ms, value: {{ $v.ray.health.periodMs | int | quote }}}
        - {name: RAY_health_check_timeout_ms, value: {{ $v.ray.health.timeoutMs | int | quote }}}
        - {name: RAY_health_check_failure_threshold, value: {{ $v.ray.health.failureThreshold | int | quote }}}
        # On SIGTERM what runs here leaves first: streams move or end, and Serve starts another elsewhere. Not on the head,
        # where nothing of it runs that must.
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ ternary "0" (include "forebay.leaveSeconds" $root) $head | quote }}}
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        - {name: RAY_worker_niceness, value: "0"}
        - {name: OMP_NUM_THREADS, value: "1"}
        - {name: HOME, value: /tmp/home}
        - {name: FOREBAY_CACHE_DIR, value: /tmp/forebay}
        - {name: NUMBA_CACHE_DIR, value: /tmp/numba}
        - {name: FOREBAY_NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: FOREBAY_POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: FOREBAY_POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
        {{- if not $head }}
        - name: FOREBAY_ZONE
          {{- with .zone }}
          value: {{ . }}
          {{- else }}
          # Kubernetes 1.35 and newer copies it from the node; empty before.
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
          {{- end }}
        {{- end }}
        {{- if not .gpus }}
        # An image that is made for GPUs would be given all of the node's.
        - {name: NVIDIA_VISIBLE_DEVICES, value: void}
        {{- end }}
        {{- range $name, $value := $v.ray.env }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
      ports:
        {{- if $head }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        {{- else if eq .component "router" }}
        - {name: http, containerPort: {{ $v.router.port | int }}}
        {{- else if eq .component "model" }}
        - {name: model-metrics, containerPort: {{ $v.monitoring.ports.model | int }}}
        {{- end }}
        {{- if eq .component (include "forebay.home" $root) }}
        - {name: control-metrics, containerPort: {{ $v.monitoring.ports.controller | int }}}
        {{- end }}
        - {name: metrics, containerPort: 8080}
      {{- if $head }}
      # Where the whole cluster goes, the other pods can be left only as long as there is a GCS.
      lifecycle:
        preStop:
          exec: {command: [python, -m, deployments.last_node, {{ add (int (include "forebay.leaveSeconds" $root)) 30 | quote }}]}
      {{- end }}
      # While this holds, nothing judges the pod: Ray starts, and its models load.
      startupProbe:
        exec: {command: {{ toJson $alive }}}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: {{ div (add (int $v.startup.modelLoadSeconds) 9) 10 }}
      # KubeRay's own waits for a proxy of Serve's on port 8000, and there is none.
      readinessProbe:
        exec: {command: {{ toJson $ready }}}
        periodSeconds: {{ ternary (int $v.router.readinessPeriodSeconds) 5 (eq .component "router") }}
        timeoutSeconds: 10
        failureThreshold: 1
      livenessProbe:
        exec: {command: {{ toJson $alive }}}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 12
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: ray-logs, mountPath: /tmp/ray}
        - {name: models, mountPath: {{ $v.modelStore.mountPath }}, readOnly: true}
        - {name: cluster-secret, mountPath: /run/forebay/cluster, readOnly: true}
        - {name: ray-token, mountPath: /run/forebay/ray, readOnly: true}
        {{- if and (eq .component "router") (eq $v.router.auth "keys") }}
        - {name: keys, mountPath: /run/forebay/keys, readOnly: true}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    # The name that KubeRay's autoscaler knows it by.
    - {name: ray-logs, emptyDir: {}}
    - {name: models, persistentVolumeClaim: {claimName: {{ $v.modelStore.claimName }}, readOnly: true}}
    - {name: cluster-secret, secret: {secretName: {{ $v.secrets.cluster.name }}, defaultMode: 0440}}
    - {name: ray-token, secret: {secretName: {{ $v.secrets.rayToken.name }}, defaultMode: 0440}}
    {{- if and (eq .component "router") (eq $v.router.auth "keys") }}
    - {name: keys, secret: {secretName: {{ $v.secrets.keys.name }}, defaultMode: 0440}}
    {{- end }}
  {{- with .nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* No two of a component on one node. Takes root, component, how (required, preferred). */}}
{{- define "forebay.apart" -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (merge (dict "app.kubernetes.io/component" .component) (include "forebay.selector" .root | fromYaml))) }}
{{- if eq .how "required" }}
{{- toYaml (dict "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term))) }}
{{- else }}
{{- toYaml (dict "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)))) }}
{{- end }}
{{- end }}
