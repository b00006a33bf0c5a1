#!/usr/bin/env bash
# Set up and run the tests, two files at a time; arguments go to pytest: ./run_tests.sh -k formats
# --fast leaves out the files that take longest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. toolkit/sweep/environment.sh
use_environment dev xdist
# two processes on two cores: threads that spin while they wait would take each other's time
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
unset PYTHONDONTWRITEBYTECODE  # some tests start processes, which would each compile all that they import
# by file, as many share a slow fixture, and in the order of tests/conftest.py; -n 0: in turns
exec "$python" -P -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
