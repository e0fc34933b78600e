#!/usr/bin/env bash
# The tests that take minutes. Usage: scripts/run_slow_tests.sh [further options of pytest]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/run_tests.sh" -m slow "$@"
