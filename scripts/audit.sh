#!/bin/sh
# Ask an advisory service whether a locked package has a known vulnerability. Needs the network, so it is no part
# of `make test`; run it once a day where that is reached (docs/accounts.md). Arguments go to pip-audit.
# Exits 0 none known, 1 some are, 2 the service could not be asked: nothing is known then, good or bad.
set -u
cd "$(dirname "$0")/.."
audit=$(pwd)/.venv/bin/pip-audit
locks=${LOCKS:-requirements.txt requirements-dev.txt}
report=$(mktemp) || exit 2
said=$(mktemp) || exit 2
trap 'rm -f "$report" "$said"' EXIT
worst=0
for lock in $locks; do
    : > "$report"
    # The lock names every package with its hash: nothing is resolved or installed.
    "$audit" --disable-pip --require-hashes --requirement "$lock" --progress-spinner off --timeout 15 \
        --format json --output "$report" "$@" > "$said" 2>&1
    code=$?
    if [ ! -s "$report" ]; then
        printf 'make audit: %s: the advisory service could not be asked; nothing is known of these packages.\n' "$lock" >&2
        tail -n 3 "$said" >&2
        worst=2
        continue
    fi
    .venv/bin/python - "$lock" "$report" <<'PYTHON'
import json
import sys

lock, report = sys.argv[1:]
packages = json.load(open(report))["dependencies"]
known = [(one["name"], one["version"], bug) for one in packages for bug in one.get("vulns", [])]
skipped = [f"{one['name']}: {one['skip_reason']}" for one in packages if "skip_reason" in one]
print(f"{lock}: {len(packages)} packages, {len(known)} known vulnerabilities")
for name, version, bug in known:
    print(f"  {name} {version}: {bug['id']}, fixed in {', '.join(bug['fix_versions']) or 'no version yet'}")
for line in skipped:
    print(f"  not asked: {line}")
PYTHON
    [ "$code" -eq 0 ] || [ "$worst" -ne 0 ] || worst=1
done
exit "$worst"
