#!/usr/bin/env bash
# Kernels and bandwidth on a machine with one NVIDIA GPU, PyTorch and Triton; no network, no SGLang, no pytest.
# scripts/device_check.sh [FILE]: results as JSON; run it again to go on. At most eight minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
unset TRITON_INTERPRET
exec timeout 475 "${PYTHON:-python3}" -m triton_ops.device_check --json "${1:-device_check.json}" --seconds 400
