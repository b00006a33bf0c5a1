# Sourced by papermill_runs.sh and run_tests.sh from the checkout's root: sets $python to an interpreter that has the
# toolkit. An active environment that has it (conda's, or your own) is used as it is; else .venv is made from the lock.
# $1: the extra of pyproject.toml to install ("lab", or "dev" with all of it), $2: a module that shows it is there.

fail() { echo "error: $*" >&2; exit 2; }

is_ready() {  # $1: interpreter; true if it imports this checkout's toolkit and the extra's module
    "$1" -P -c "import importlib.util as u, pathlib, toolkit
assert pathlib.Path(toolkit.__file__).parents[1].samefile('.') and u.find_spec('$module')" 2>/dev/null
}

find_python() {  # the first Python that is recent enough
    local candidate
    for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"; return
        fi
    done
    fail "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python $0"
}

is_made() {  # $1: extra, $2: checksum of what is wanted; dev has all that lab has
    local stamp
    for stamp in ".venv/installed-$1" .venv/installed-dev; do
        [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$2" ] && return
    done
    return 1
}

is_foreign() {  # true if .venv belongs to another place: this checkout was moved or copied with it
    [ -d .venv ] && [ "$(cat .venv/made-in 2>/dev/null)" != "$(pwd -P)" ]
}

make_venv() {  # $1: extra
    local extra=$1 base stamp wanted
    if is_foreign; then
        echo "This checkout was moved or copied: its .venv belongs to another folder and is made again."
        rm -rf .venv
    fi
    stamp=.venv/installed-$extra
    wanted=$(cat requirements.lock pyproject.toml | cksum)
    is_made "$extra" "$wanted" && return
    if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        base=$(find_python) || exit 2
        rm -rf .venv  # what an interrupted set-up left
        "$base" -m venv .venv || fail "could not make .venv with $base (on Debian: apt install python3-venv)"
        pwd -P > .venv/made-in  # its scripts and its link to the toolkit name this folder
    fi
    echo "Setting up .venv from requirements.lock (some minutes, once) ..."
    rm -f "$stamp"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint requirements.lock --editable ".[$extra]" ||
        fail "set-up stopped: pip could not install what requirements.lock names (its message is above); with the network or disk space back, the same command goes on"
    # by all cores, where pip takes one; not what few programs import: a third of the files. Some are templates.
    .venv/bin/python -m compileall -qq -j 0 -x '/tests/|/transformers/models/(?!auto|llama)' .venv/lib || true
    echo "$wanted" > "$stamp"
}

use_environment() {
    local extra=$1
    module=$2
    if python=$(command -v python) && is_ready "$python"; then
        return
    fi
    (   # one set-up at a time
        if command -v flock >/dev/null; then flock 9; fi
        make_venv "$extra"
    ) 9>.setup.lock || exit 2
    python=$PWD/.venv/bin/python
}
