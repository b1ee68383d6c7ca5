#!/bin/sh
# Make the evidence bucket with Object Lock, which a bucket can only get at birth, and a default retention that
# covers uploads in parts from their first byte.
set -eu
mc alias set store http://store:9000 "$(cat /run/secrets/store_user)" "$(cat /run/secrets/store_password)" >/dev/null
mc mb --ignore-existing --with-lock store/andon-evidence
mc retention set --default GOVERNANCE 30d store/andon-evidence
