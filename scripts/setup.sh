#!/bin/sh
# Create .venv and install what the lock file says. `setup.sh live` adds torch for `make demo LIVE=1`;
# `setup.sh trainers` adds it with the frameworks whose loops the tests watch.
# Safe to repeat and quick when nothing changed; needs Python 3.11 or newer and nothing else.
set -eu
cd "$(dirname "$0")/.."

fail() {
    printf 'make setup: %s\n' "$*" >&2
    exit 1
}

# The first of the usual names that is new enough; PYTHON=/path/to/python decides otherwise.
find_python() {
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

# These are large, differ by machine and are in no lock: a module that shows they are there, and the packages.
add() {
    module=$1
    shift
    .venv/bin/python -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$module'))" && exit 0
    printf 'make setup: installing %s\n' "$*"
    exec .venv/bin/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore "$@"
}
torch="torch==2.13.0"
case "${1:-}" in
live) add torch "$torch" ;;
trainers) add lightning "$torch" torchdata==0.11.0 transformers==5.24.0 accelerate==1.15.0 lightning==2.6.6 ;;
esac

wanted=$(cat requirements-dev.txt pyproject.toml scripts/setup.sh | cksum)
if [ -x .venv/bin/python ] && [ "$(cat .venv/andon-setup 2>/dev/null)" = "$wanted $(pwd)" ]; then
    exit 0
fi

python=$(find_python)
[ -n "$python" ] || fail "Python 3.11 or newer is needed and none was found (python3 is \
$(python3 -V 2>&1 || true)). Install one, or name it: make setup PYTHON=/path/to/python3.11"
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python cannot make a virtual environment: \
its venv and ensurepip modules are missing. On Debian and Ubuntu: apt-get install python3-venv"

# A .venv of a moved checkout or a removed Python cannot be repaired.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    printf 'make setup: making .venv with %s\n' "$("$python" -V)"
    rm -rf .venv
    "$python" -m venv .venv
fi
printf 'make setup: installing\n'
rm -f .venv/andon-setup
pip() {
    .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"
}
pip install --quiet --root-user-action=ignore --require-hashes -r requirements-dev.txt
pip install --quiet --root-user-action=ignore --no-deps --no-build-isolation -e .
printf '%s' "$wanted $(pwd)" > .venv/andon-setup
