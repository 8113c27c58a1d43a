#!/usr/bin/env bash
# Sees to a Chromium for the page's tests and pictures: one that is there, else Debian's package, else playwright's own.
set -euo pipefail
for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome; do
  if [ -n "$name" ] && command -v "$name" >/dev/null; then
    exit 0
  fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq update
  apt-get -qq install --yes --no-install-recommends chromium fonts-dejavu-core >/dev/null
else
  "$(dirname "$0")/../.venv/bin/playwright" install chromium
fi
