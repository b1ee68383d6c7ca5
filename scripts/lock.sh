#!/bin/sh
# Compile requirements.in and requirements-dev.in into lock files: one version for every platform and Python from
# 3.11 up, with hashes and without any address of an index. The server's lock is a part of the whole's.
set -eu
cd "$(dirname "$0")/.."
.venv/bin/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore uv
compile() {
    .venv/bin/python -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-header --no-emit-index-url --no-emit-find-links "$@"
}
compile requirements-dev.in -o requirements-dev.txt
compile requirements.in -c requirements-dev.txt -o requirements.txt
if grep -nE 'https?://' requirements.txt requirements-dev.txt; then
    echo "lock: an address got into a lock file (above)" >&2
    exit 1
fi
