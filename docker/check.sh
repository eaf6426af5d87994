#!/bin/sh
# Build the image and run it, without a daemon: needs root and buildah; and debootstrap where BASE names no image.
#   docker/check.sh [IMAGE]        BASE=docker.io/library/python:3.11-slim docker/check.sh
# Prints the image's size and what it answers; exit code 0 where all of it holds.
set -eu
cd "$(dirname "$0")/.."
image=${1:-localhost/remat}
work=$(mktemp -d)
export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=chroot
box=
finish() {
  status=$?
  [ -z "$box" ] || buildah rm "$box" >/dev/null
  rm -rf "$work"
  exit "$status"
}
trap finish EXIT
fail() { echo "image: $1" >&2; exit 1; }

if [ -z "${BASE:-}" ]; then
  echo "image: a base with Python from Debian's packages"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "${SUITE:-bookworm}" "$work/root" \
    >"$work/debootstrap.log" 2>&1 || { tail "$work/debootstrap.log" >&2; fail "debootstrap failed"; }
  rm -rf "$work/root/var/cache/apt" "$work/root/var/lib/apt/lists"
  base=$(buildah from scratch)
  buildah add -q "$base" "$work/root" / >/dev/null
  buildah commit -q "$base" localhost/remat-base >/dev/null
  buildah rm "$base" >/dev/null
  BASE=localhost/remat-base
fi

# pip's settings of this machine, such as a mirror, and its certificates reach the build; none of them stays in the image
certificates=/etc/ssl/certs/ca-certificates.crt
python3 - >"$work/pip.conf" <<'PY'
import configparser, pathlib, sys

merged = configparser.RawConfigParser(strict=False)
merged.read([pathlib.Path(p).expanduser() for p in ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")])
merged.write(sys.stdout)
PY
echo "image: building"
# shellcheck disable=SC2086
buildah build -q -f docker/Dockerfile --build-arg BASE="$BASE" \
  -v "$work/pip.conf:/etc/pip.conf:ro" \
  -v "$certificates:$certificates:ro" ${BUILD_OPTIONS:-} \
  -t "$image" . >"$work/build.log" 2>&1 || { tail -30 "$work/build.log" >&2; fail "the build failed"; }

box=$(buildah from "$image")
root=$(buildah mount "$box")
echo "image: $(du -sm "$root" | cut -f1) MiB, of which $(du -sm "$root/opt/remat" | cut -f1) MiB are remat and what it needs"
[ ! -e "$root/opt/remat/bin/pip" ] || fail "pip is in it"
chmod -R a-w "$root/opt/remat"
kernels() { find "$root" -xdev -name '*.nb[ci]' -printf '%p %s %T@\n' 2>/dev/null | sort; }
compiled=$(kernels)

run() { buildah run --user 10001 --env HOME=/nonexistent "$box" -- "$@"; }
run python -m remat_solver.warm --check || fail "kernels are not compiled in it"
[ "$(run python -c 'import os; print(os.getuid())')" = 10001 ] || fail "it does not run as user 10001"
run remat-service --version
key=$(run remat-service keys create check --new-tenant 2>/dev/null)
run remat-service serve >"$work/serve.log" 2>&1 &
server=$!
for _ in $(seq 100); do grep -q "ready on" "$work/serve.log" && break; sleep 0.3; done
answers=$(CHECK_KEY=$key python3 - <<'PY'
import json, os, urllib.request

costs, inputs = [1] * 24, [[]] + [[i - 1] for i in range(1, 12)]
for back in range(12):
    layer = 11 - back
    inputs.append(sorted({11 + back, *([layer - 1] if layer else [])}))
graph = {
    "format": "remat-graph/1", "op_cost_ns": costs, "op_workspace_bytes": [0] * 24, "value_op": list(range(24)),
    "value_bytes": [10] * 12 + [5] * 12, "keep": [23], "op_inputs": inputs, "backward_from": 12,
}
chain = {
    "format": "remat-chain/1", "forward_ns": [1000] * 5, "backward_ns": [2000] * 5, "activation_bytes": [100] * 6,
    "gradient_bytes": [100] * 6, "tape_bytes": [300] * 5, "forward_workspace_bytes": [0] * 5,
    "backward_workspace_bytes": [0] * 5, "link_bytes_per_s": 10**8,
}
headers = {"Authorization": "Bearer " + os.environ["CHECK_KEY"], "Content-Type": "application/json", "Prefer": "wait=20"}
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy is for the packages alone
of_graph, of_chain = {"graph": graph, "budget_bytes": 90}, {"chain": chain, "budget_bytes": 1400}
for method, problem in (
    ("search", of_graph), ("blocks", of_graph), ("rotor", of_graph), ("pofo", of_chain), ("transfers", of_chain)
):
    body = json.dumps({"problem": problem, "method": method, "time_limit_s": 5}).encode()
    request = urllib.request.Request("http://127.0.0.1:8750/v1/solves", body, headers)
    print(method, json.load(opener.open(request))["status"])
PY
) || answers="$answers, then nothing"
pkill -P "$server" 2>/dev/null || kill "$server"
[ "$(echo "$answers" | grep -c -e ' feasible$' -e ' optimal$')" = 5 ] ||
  { tail -5 "$work/serve.log" >&2; fail "five problems were answered: $answers"; }
! grep -i compil "$work/serve.log" >&2 || fail "a kernel was compiled in it"
[ "$(kernels)" = "$compiled" ] || fail "numba's cache was written"
echo "image: passed"
