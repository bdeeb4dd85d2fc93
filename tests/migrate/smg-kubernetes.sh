smg launch --service-discovery --selector app=engine tier=gpu \
    --service-discovery-port 8000 --service-discovery-namespace inference \
    --backend vllm --policy least_load --model-alias chat=meta-llama/Llama-3.1-8B-Instruct \
    --enable-mesh --mesh-port 39527 --mesh-peer-urls 10.0.0.9:39527 \
    --tenant-api-key acme:not-a-real-key \
    --stream-body-stall-timeout-secs 45 --log-json --no-such-flag 7
