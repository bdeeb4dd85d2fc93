#!/bin/sh
# Four replicas of one model behind a router.
set -e
export VLLM_KEY=$(cat /run/secrets/engines)

exec vllm-router \
    --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000 \
                  "http://[fd00::3]:8000" http://10.0.0.4:8000 \
    --host 0.0.0.0 --port 30000 \
    --policy round_robin \
    --intra-node-data-parallel-size 2 \
    --api-key "$VLLM_KEY" \
    --request-timeout-secs 900 \
    --retry-max-retries 3 --retry-initial-backoff-ms 100 \
    --cb-failure-threshold 5 \
    --health-check-interval-secs 10 --health-check-timeout-secs 3 \
    --health-failure-threshold 2 --health-success-threshold 1 \
    --max-concurrent-requests 256 --queue-size 64 \
    --prometheus-host 0.0.0.0 --prometheus-port 29000 \
    --request-id-headers x-request-id x-trace-id \
    --log-level warning 2>&1 | tee /var/log/router.log
