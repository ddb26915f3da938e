#!/usr/bin/env bash
# Kernels and bandwidth on a machine with one NVIDIA GPU, PyTorch and Triton; no network, no SGLang, no pytest.
# scripts/device_check.sh [FILE]: results as JSON, and as a table beside it; run it again to go on. At most eight minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
unset TRITON_INTERPRET
exec timeout 475 "${PYTHON:-python3}" -m triton_ops.device_check --json "${1:-bench_serving/results/device.json}" --seconds 400
