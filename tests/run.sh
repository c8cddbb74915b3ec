#!/usr/bin/env bash
# Sets up .venv where it is missing or old, and passes the tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash examples/setup.sh
OMP_NUM_THREADS=1 .venv/bin/python -m pytest "$@"
