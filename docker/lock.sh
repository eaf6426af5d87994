#!/bin/sh
# Write docker/requirements.lock anew: the versions of constraints.txt for a service and its build, with the hashes of
# their files. Needs uv.
set -eu
cd "$(dirname "$0")/.."
echo hatchling | uv pip compile pyproject.toml - --extra service --extra telemetry --extra oidc -c constraints.txt \
  --python-version 3.11 --universal --generate-hashes --no-annotate --quiet \
  --custom-compile-command docker/lock.sh -o docker/requirements.lock
