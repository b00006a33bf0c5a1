#!/usr/bin/env bash
# Set up and run the tests; arguments go to pytest: ./run_tests.sh -k formats
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. toolkit/sweep/environment.sh
use_environment dev pytest
exec "$python" -P -m pytest "$@"
