#!/usr/bin/env bash
# Checks style and types and runs the tests. Sets everything up by itself.
#
#   scripts/test.sh           everything that needs no GPU: what CI runs
#   scripts/test.sh --fast    without the tests marked `long`, but for those marked `smoke`;
#                             of costly parametrized ones a few with each value of each parameter
#   scripts/test.sh PATH...   pytest alone, with these arguments: a path, -k, -x ...
#
# TEST_PROCESSES: how many tests run at the same time (default 2).
# PYTHONS: versions, such as "3.12 3.13", that are set up for the test under other Pythons; the default
# is the lowest. An environment that is there (.venv-3.12) is always tried.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
[ $# -gt 0 ] || start_pythons
setup dev
if [ $# -eq 0 ] || [ "$*" = --fast ]; then
  "$venv/bin/python" -m ruff check .
  "$venv/bin/python" -m ruff format --check .
  "$venv/bin/python" -m mypy
  [ -z "$pythons" ] || wait_for_pythons
  fast=$*
  # A file's tests share what they set up and stay together; tests/durations.py has the order.
  set -- -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder --durations 20
  [ -z "$fast" ] || set -- "$@" -m "not gpu and not slow and not transformer_engine and (not long or smoke)"
fi
# Hundreds of processes import the engine, and each would compile its sources: a third of a second.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$venv/bin/python" -m pytest "$@"
