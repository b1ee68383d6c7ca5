#!/bin/sh
# Install what apt-packages.txt names and this machine lacks; say what is missing where that is not possible.
set -eu
cd "$(dirname "$0")/.."

wanted=$(grep -v '^#' apt-packages.txt)
if ! command -v dpkg-query >/dev/null 2>&1; then
    printf 'make test: no apt here; tests that need one of these are named as not run:\n%s\n' "$wanted"
    exit 0
fi
missing=""
for package in $wanted; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    printf 'make test: not installed and not mine to install:%s\n' "$missing"
    printf 'make test: tests that need them are named as not run; to install: apt-get install%s\n' "$missing"
    exit 0
fi
printf 'make test: installing%s\n' "$missing"
$as_root apt-get -qq update
# shellcheck disable=SC2086 # words on purpose
$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing >/dev/null
