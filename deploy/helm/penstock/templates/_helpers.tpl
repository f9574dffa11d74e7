{{/* Name of the pods of one role; without roles, the name of the release. */}}
{{- define "penstock.name" -}}
{{ .root.Release.Name }}{{ with .role }}-{{ . }}{{ end }}
{{- end -}}

{{/* Labels that select the pods of one role. They must never change. */}}
{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/*
The pods of one role. Takes root (the chart), role (controller, replica or empty), pods (their
number) and standbys (how many of them stand by).
*/}}
{{- define "penstock.pods" -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ include "penstock.name" . }}
  labels:
    {{- include "penstock.labels" . | nindent 4 }}
spec:
  replicas: {{ .pods }}
  serviceName: {{ .service }}
  # A standby, and a replica without a controller, is not ready, so pods must not wait for each other.
  podManagementPolicy: Parallel
  {{- if .standbys }}
  # A rolling update would wait forever for a standby to become ready.
  updateStrategy:
    type: OnDelete
  {{- end }}
  selector:
    matchLabels:
      {{- include "penstock.labels" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "penstock.labels" . | nindent 8 }}
      {{- with .root.Values.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 30
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: penstock
          image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag }}"
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          args: ["serve"]
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: ["ALL"]
          env:
            - name: PENSTOCK_IDENTITY
              value: {{ .root.Values.identity | quote }}
            - name: PENSTOCK_STATE_DIR
              value: /var/lib/penstock/state
            {{- with .role }}
            - name: PENSTOCK_ROLE
              value: {{ . }}
            - name: PENSTOCK_CLUSTER_TOKEN_FILE
              value: /etc/penstock/cluster/tokens
            {{- end }}
            {{- if .standbys }}
            - name: PENSTOCK_STANDBY
              value: "true"
            {{- end }}
            {{- if eq .role "replica" }}
            - name: POD_NAME
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            - name: PENSTOCK_CLUSTER_ADVERTISE
              value: "$(POD_NAME).{{ .service }}.{{ .root.Release.Namespace }}.svc"
            - name: PENSTOCK_CLUSTER_LISTEN
              value: "0.0.0.0:{{ .root.Values.ports.cluster }}"
            - name: PENSTOCK_STORAGE_LISTEN
              value: "0.0.0.0:{{ .root.Values.ports.storage }}"
            {{- else }}
            - name: PENSTOCK_LISTEN
              value: "0.0.0.0:{{ .root.Values.ports.client }}"
            {{- if .root.Values.ports.postgres }}
            - name: PENSTOCK_PG_LISTEN
              value: "0.0.0.0:{{ .root.Values.ports.postgres }}"
            {{- end }}
            {{- if .root.Values.ports.connect }}
            - name: PENSTOCK_CONNECT_LISTEN
              value: "0.0.0.0:{{ .root.Values.ports.connect }}"
            {{- end }}
            {{- end }}
            - name: PENSTOCK_METRICS_LISTEN
              value: "0.0.0.0:{{ .root.Values.ports.metrics }}"
            - name: PENSTOCK_TLS_CERTIFICATE
              value: /etc/penstock/tls/tls.crt
            - name: PENSTOCK_TLS_KEY
              value: /etc/penstock/tls/tls.key
            - name: PENSTOCK_TLS_AUTHORITY
              value: /etc/penstock/tls/ca.crt
            - name: PENSTOCK_TOKEN_FILE
              value: /etc/penstock/tokens/tokens
            {{- range $name, $value := .root.Values.settings }}
            - name: PENSTOCK_{{ $name | upper }}
              value: {{ $value | quote }}
            {{- end }}
          {{- with .root.Values.secretEnvironment }}
          envFrom:
            {{- range . }}
            - secretRef:
                name: {{ . | quote }}
            {{- end }}
          {{- end }}
          ports:
            {{- if eq .role "replica" }}
            - name: cluster
              containerPort: {{ .root.Values.ports.cluster }}
            - name: storage
              containerPort: {{ .root.Values.ports.storage }}
            {{- else }}
            - name: client
              containerPort: {{ .root.Values.ports.client }}
            {{- if .root.Values.ports.postgres }}
            - name: postgres
              containerPort: {{ .root.Values.ports.postgres }}
            {{- end }}
            {{- if .root.Values.ports.connect }}
            - name: connect
              containerPort: {{ .root.Values.ports.connect }}
            {{- end }}
            {{- end }}
            - name: metrics
              containerPort: {{ .root.Values.ports.metrics }}
          readinessProbe:
            httpGet:
              path: /readyz
              port: metrics
              scheme: HTTPS
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 2
          # Health, not readiness: do not restart because a store is unavailable.
          livenessProbe:
            httpGet:
              path: /healthz
              port: metrics
              scheme: HTTPS
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          resources:
            {{- toYaml .root.Values.resources | nindent 12 }}
          volumeMounts:
            - name: state
              mountPath: /var/lib/penstock
            - name: temporary
              mountPath: /tmp
            - name: tls
              mountPath: /etc/penstock/tls
              readOnly: true
            - name: tokens
              mountPath: /etc/penstock/tokens
              readOnly: true
            {{- if .role }}
            - name: cluster
              mountPath: /etc/penstock/cluster
              readOnly: true
            {{- end }}
      volumes:
        - name: temporary
          emptyDir: {}
        - name: tls
          secret:
            secretName: {{ .root.Values.tls.secretName | quote }}
            defaultMode: 0440
        - name: tokens
          secret:
            secretName: {{ .root.Values.tokens.secretName | quote }}
            defaultMode: 0440
        {{- if .role }}
        - name: cluster
          secret:
            secretName: {{ .root.Values.roles.tokens.secretName | quote }}
            defaultMode: 0440
        {{- end }}
      {{- with .root.Values.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .root.Values.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .root.Values.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
  volumeClaimTemplates:
    - metadata:
        name: state
      spec:
        accessModes: ["ReadWriteOnce"]
        {{- with .root.Values.persistence.storageClassName }}
        storageClassName: {{ . | quote }}
        {{- end }}
        resources:
          requests:
            storage: {{ .root.Values.persistence.size | quote }}
{{- end -}}
