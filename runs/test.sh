#!/usr/bin/env bash
# Sets up .venv if need be and runs the tests. Arguments go to pytest: bash runs/test.sh -k advantages
set -euo pipefail
source "$(dirname "$0")/setup.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} WANDB_MODE=disabled
unset PYTHONDONTWRITEBYTECODE  # or each worker and each process that a test starts would compile all anew
# One worker more than CI has cores: tests that start processes wait for them. Files in the order of tests/conftest.py.
python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder "$@"
