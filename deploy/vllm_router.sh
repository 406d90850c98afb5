#!/usr/bin/env bash
# vllm-router (pip install vllm-router; Rust, Apache-2.0) in front of plain `miniengine serve` processes:
#
#   deploy/vllm_router.sh http://host-a:8000 http://host-b:8000      # then talk to http://127.0.0.1:30000
#
# POLICY, PORT and ROUTER_ARGS (more options) may be set. The options that are not the router's defaults were found by killing
# a replica under load (bench/replicas.py). A retry of the cache-aware policy goes to the same dead replica, five times within
# milliseconds, and the circuit breaker opens only at ten failures: so it opens at the second, and the retry reaches another.
# It would stay open for a minute: five seconds are enough, since the health check decides too.
set -euo pipefail
[[ $# -gt 0 ]] || { echo "usage: $0 URL..." >&2; exit 2; }
command -v "${VLLM_ROUTER:=vllm-router}" >/dev/null || { echo "$VLLM_ROUTER is missing: pip install vllm-router" >&2; exit 1; }
# shellcheck disable=SC2086
exec "$VLLM_ROUTER" --port "${PORT:-30000}" --policy "${POLICY:-cache_aware}" --worker-urls "$@" \
  --health-check-endpoint /ready --health-check-interval-secs 1 --health-failure-threshold 1 \
  --cb-failure-threshold 2 --cb-success-threshold 1 --cb-timeout-duration-secs 5 \
  --worker-startup-check-interval 1 ${ROUTER_ARGS:-}
