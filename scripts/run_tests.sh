#!/usr/bin/env bash
# Lint, type-check and test. Usage: scripts/run_tests.sh [further options of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh
prepare_environment test

.venv/bin/ruff check .
.venv/bin/ruff format --check .
MYPY_NUM_WORKERS=2 .venv/bin/mypy
# Keep compiled code, whatever the environment says: each worker compiles every test otherwise, and
# each process that a test starts compiles the package.
unset PYTHONDONTWRITEBYTECODE
# Two at a time, whatever the number of cores: the tests fill real memory.
# A worker that has run out of tests takes over some of the other one.
exec .venv/bin/python -m pytest -n 2 --dist worksteal "$@"
