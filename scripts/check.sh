#!/bin/sh
# Every check, in the order in which a mistake is cheapest to see. All run, so that one call shows all that is
# wrong; the tests come last, with pytest's own closing line. `--static` leaves the tests out; any other
# argument goes to pytest.
set -u
cd "$(dirname "$0")/.."
bin=.venv/bin
failed=""

static_only=""
if [ "${1:-}" = --static ]; then
    static_only=1
    shift
fi

# Nothing of the caller's configuration may decide whether the checks pass.
for name in $(env | sed -n 's/^\(ANDON_[A-Z_]*\)=.*/\1/p'); do unset "$name"; done
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
export ANDON_DATA_DIR="$scratch/data"

step() {
    name=$1
    shift
    if output=$("$@" 2>&1); then
        printf 'ok      %s\n' "$name"
    else
        printf 'FAILED  %s\n%s\n' "$name" "$output"
        failed="$failed $name,"
    fi
}

# As deployed: https, a real secret, a proxy in front. Warnings count.
deployment() {
    env ANDON_PUBLIC_URL=https://andon.example.org ANDON_BEHIND_PROXY=1 \
        ANDON_SECRET_KEY="$($bin/python -c 'import secrets; print(secrets.token_urlsafe(48))')" \
        $bin/python manage.py check --deploy --fail-level WARNING
}

migrations() {
    # It has no database to compare its history with here, and says so; the tests migrate a real one.
    $bin/python -W ignore::RuntimeWarning manage.py makemigrations --check --dry-run
}

step lint $bin/ruff check .
step format $bin/ruff format --check .
step types $bin/mypy .
step imports $bin/lint-imports
step migrations migrations
step deployment deployment

if [ -z "$static_only" ]; then
    scripts/packages.sh || failed="$failed packages,"
    # CI trains for real too. Where torch cannot be had (it is in no lock) that is said and no more.
    if [ "${CI:-}" = true ] && ! timeout 300 scripts/setup.sh trainers; then
        printf 'not run torch could not be installed: nothing is trained in these tests\n'
    fi
    unset ANDON_DATA_DIR
    # Three workers: on two cores the tests wait for servers about half of their time. Each has its own database;
    # PostgreSQL, Valkey and radosgw are shared. Tests of one xdist_group stay together.
    $bin/python -m pytest -n 3 --dist loadgroup "$@" || failed="$failed tests,"
fi
if [ -n "$failed" ]; then
    printf 'make test: failed:%s\n' "${failed%,}" >&2
    exit 1
fi
