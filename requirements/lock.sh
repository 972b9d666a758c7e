#!/usr/bin/env bash
# Resolves every requirements/*.lock for Python 3.11 to 3.13, with hashes and without addresses.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
"$tools/bin/python" -m pip install --quiet uv
resolve() {
    local target=$1
    shift
    "$tools/bin/uv" pip compile --quiet --upgrade --universal --fork-strategy fewest --python-version 3.11 \
        --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
        "$@" -o "requirements/$target"
}
resolve build.lock requirements/build.in
resolve gateway.lock pyproject.toml
resolve worker.lock pyproject.toml --extra worker
resolve worker-cuda.lock pyproject.toml --extra worker --extra cuda13
resolve worker-cuda12.lock pyproject.toml --extra worker --extra cuda12
resolve dev.lock pyproject.toml --extra worker --extra cuda13 --extra local --extra dev requirements/build.in
resolve images.lock requirements/images.in
