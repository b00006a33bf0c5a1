#!/usr/bin/env bash
# Run every notebook, headless, into results/, and write the report: ./papermill_runs.sh --help
set -euo pipefail
export TOOLKIT_CALLED_FROM=$PWD  # where relative folders are meant
cd "$(dirname "${BASH_SOURCE[0]}")"
. toolkit/sweep/environment.sh
use_environment lab papermill
exec "$python" -P -m toolkit.sweep "$@"
