#!/bin/sh
# Runs once, when the database container makes its cluster: the database and its two roles. `andon_owner` owns the
# tables and is only used by migrations; `andon_app` owns nothing. What each may do is granted by the migrations.
set -eu
psql -v ON_ERROR_STOP=1 --username postgres \
    -v owner_password="$(cat /run/secrets/owner_password)" -v app_password="$(cat /run/secrets/app_password)" <<'SQL'
CREATE ROLE andon_owner LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD :'owner_password';
CREATE ROLE andon_app LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD :'app_password';
CREATE DATABASE andon OWNER andon_owner;
REVOKE ALL ON DATABASE andon FROM PUBLIC;
GRANT CONNECT ON DATABASE andon TO andon_app;
SQL
