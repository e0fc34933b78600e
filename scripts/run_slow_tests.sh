#!/usr/bin/env bash
# The tests that take minutes, and every property with 2000 examples (the profile is in
# tests/conftest.py). Usage: scripts/run_slow_tests.sh [further options of pytest]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/run_tests.sh" -m "slow or hypothesis" \
    --hypothesis-profile=nightly --timeout=3600 "$@"
