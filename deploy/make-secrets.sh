#!/bin/sh
# Write every secret that docker-compose.yml mounts into deploy/secrets/. What is there already stays.
# The files are readable inside a directory that is not: containers run as users that do not exist here.
set -eu
cd "$(dirname "$0")"
command -v openssl >/dev/null || { echo "make-secrets.sh: needs openssl" >&2; exit 1; }
host=${ANDON_PUBLIC_URL:-https://localhost}
host=${host#*://}
host=${host%%[:/]*}
umask 077
mkdir -p secrets
chmod 0700 secrets
cd secrets

keep() {
    if [ -s "$1" ]; then
        cat > /dev/null
    else
        cat > ".unfinished-$1"
        chmod 0444 ".unfinished-$1"
        mv ".unfinished-$1" "$1"
    fi
}

random() {
    openssl rand -hex "$1"
}

random 32 | keep secret_key
openssl genpkey -algorithm ed25519 | keep signing_key
for name in postgres_password owner_password app_password redis_password store_password; do
    random 24 | keep "$name"
done
echo andon-store | keep store_user
echo "postgresql://andon_app:$(cat app_password)@postgres:5432/andon" | keep database_url
echo "postgresql://andon_owner:$(cat owner_password)@postgres:5432/andon" | keep database_owner_url
echo "redis://:$(cat redis_password)@redis:6379/0" | keep broker_url
printf 'requirepass %s\nsave ""\nappendonly no\nmaxmemory 512mb\nmaxmemory-policy noeviction\n' \
    "$(cat redis_password)" | keep redis_configuration
printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' \
    "$(cat store_user)" "$(cat store_password)" | keep store_credentials
if [ ! -s tls_key ]; then
    # Put your own certificate and key here; this one only lets the first start succeed.
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 90 -subj "/CN=$host" \
        -addext "subjectAltName=DNS:$host,DNS:localhost" -keyout .tls_key.new -out .tls_certificate.new 2>/dev/null
    keep tls_certificate < .tls_certificate.new
    keep tls_key < .tls_key.new
    rm -f .tls_certificate.new .tls_key.new
fi
