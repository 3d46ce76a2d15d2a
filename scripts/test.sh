#!/usr/bin/env bash
# Checks style and types and runs the tests. Sets everything up by itself.
# Arguments go to pytest: a path, -k, -x ...; with arguments the checks are left out.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
setup dev
if [ $# -eq 0 ]; then
  "$venv/bin/python" -m ruff check .
  "$venv/bin/python" -m ruff format --check .
  "$venv/bin/python" -m mypy
  set -- -n "${TEST_PROCESSES:-2}" --dist loadfile --durations 15
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$venv/bin/python" -m pytest "$@"
