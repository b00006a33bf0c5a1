#!/usr/bin/env bash
# Run every notebook, headless, into results/, and write the report: ./papermill_runs.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. toolkit/sweep/environment.sh
use_environment
exec "$python" -P -m toolkit.sweep "$@"
