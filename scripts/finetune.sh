#!/usr/bin/env bash
# Fine-tunes a small pretrained language model in BF16 and in FP8 and shows both side by side.
# Sets everything up by itself. Arguments go to finetune.py: --quick, --model, --data, --variants ...
set -euo pipefail
source "$(dirname "$0")/setup.sh"
setup examples
exec "$venv/bin/python" benchmarks/comparison/finetune.py "$@"
