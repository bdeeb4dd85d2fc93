vllm-router --port 8000 --service-discovery static \
  --static-backends "http://10.0.0.1:8000,http://10.0.0.2:8000,http://10.0.0.3:8000" \
  --static-models "llama3,llama3,llama3" \
  --static-model-labels "pre,dec,dec" \
  --prefill-model-labels pre --decode-model-labels dec \
  --routing-logic disaggregated_prefill \
  --static-backend-health-checks --static-model-types chat,chat,chat \
  --engine-stats-interval 10 --log-stats --sentry-dsn https://k@sentry.internal/1
