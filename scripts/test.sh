#!/usr/bin/env bash
# Checks style and types and runs the tests. Sets everything up by itself.
#
#   scripts/test.sh           what needs no GPU; of costly parametrized tests, a few items that cover
#                             every value of every parameter. CI runs this
#   scripts/test.sh --all     these tests with all combinations of values
#   scripts/test.sh --fast    without the tests marked `long`, except those marked `smoke`; half a
#                             second of each parametrized test
#   scripts/test.sh --slow    only the tests marked `slow`: command lines of TRL, long emulated steps
#   scripts/test.sh PATH...   pytest alone, with these arguments: a path, -k, -x ...
#
# TEST_PROCESSES: how many tests run at the same time (default 2).
# PYTHONS: versions, such as "3.12 3.13", that are set up for the test under other Pythons; the default
# is the lowest. An environment that is there (.venv-3.12) is always tried.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
# Modules are compiled when they are first imported, a quarter of those that are installed. Hundreds of
# processes import the engine, and each would compile its sources: a third of a second.
unset PYTHONDONTWRITEBYTECODE
export PIP_COMPILE=0
case "$*" in "" | --all) start_pythons ;; esac
setup dev
case "$*" in
"" | --all | --fast | --slow)
  "$venv/bin/python" -m ruff check .
  "$venv/bin/python" -m ruff format --check .
  "$venv/bin/python" -m mypy
  [ -z "$pythons" ] || wait_for_pythons
  chosen="not gpu and not slow"
  [ "$*" = --all ] || chosen+=" and not combination"
  [ "$*" != --fast ] || chosen+=" and (not long or smoke) and not costly"
  [ "$*" != --slow ] || chosen="slow and not gpu"
  # A file's tests share what they set up and stay together; tests/durations.py has the order.
  set -- -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder --durations 20 -m "$chosen"
  ;;
esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$venv/bin/python" -m pytest "$@"
