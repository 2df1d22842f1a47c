#!/usr/bin/env bash
# What only a GPU can tell, on one GPU of 80 GB in at most 30 minutes: where the time goes, kernel by kernel; tests,
# benchmarks with their floors, a full step of the 1.5B shape with its memory beside the plan, the tiny speedrun,
# sharding. Rows go to dev/BENCH.md.
#
#   bash runs/gpu_day.sh                       arguments go to dev/gpu_day.py: --stages tests,engine
#   bash runs/gpu_day.sh --stages profile      a minute; the tables are in gpu_day/profile.log
#   SCALE=tiny bash runs/gpu_day.sh            the same stages on a CPU: a rehearsal
set -euo pipefail
source "$(dirname "$0")/setup.sh"
exec python dev/gpu_day.py --scale "${SCALE:-full}" "$@"
