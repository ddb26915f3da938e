#!/usr/bin/env bash
# Makes .venv from requirements.txt (hashes checked) and installs the project into it, editable.
# Does nothing when .venv/.stamp names the requirements.txt and pyproject.toml that are here.
# `scripts/env.sh uv ARGS...` runs uv instead, fetching it first when the machine has none.
set -euo pipefail
cd "$(dirname "$0")/.."

UV_VERSION=0.13.9

say() { echo "env: $*" >&2; }

find_uv() {
    local tried python
    # tried by running it: a version manager may leave a `uv` on PATH that does not start
    for tried in uv .cache/uv/bin/uv .cache/uv-venv/bin/uv; do
        if "$tried" --version >/dev/null 2>&1; then
            uv=$tried
            return
        fi
    done
    if ! python=$(command -v python3.11 || command -v python3); then
        say "no python3.11 on PATH: install it, then run this again"
        exit 1
    fi
    say "fetching uv $UV_VERSION into .cache"
    local -a install=(-m pip install --quiet --disable-pip-version-check)
    # --target is allowed where the system's Python is marked as externally managed
    if "$python" "${install[@]}" --target .cache/uv "uv==$UV_VERSION"; then
        uv=.cache/uv/bin/uv
    elif say "that did not work, trying with a virtual environment" &&
        "$python" -m venv --clear .cache/uv-venv &&
        .cache/uv-venv/bin/python "${install[@]}" "uv==$UV_VERSION"; then
        uv=.cache/uv-venv/bin/uv
    else
        say "$python could not fetch uv with pip (reasons above): put uv on PATH, then run this again"
        exit 1
    fi
    "$uv" --version >&2
}

# uv does not read pip's settings: take over those for the index and the certificates
if [ -n "${PIP_INDEX_URL:-}" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
    export UV_DEFAULT_INDEX=$PIP_INDEX_URL
fi
if [ -n "${PIP_CERT:-}" ] && [ -z "${SSL_CERT_FILE:-}" ]; then
    export SSL_CERT_FILE=$PIP_CERT
fi
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}

if [ "${1:-}" = uv ]; then
    shift
    find_uv
    exec "$uv" "$@"
fi

stamp=.venv/.stamp
wanted=$(cat requirements.txt pyproject.toml | sha256sum | cut -d' ' -f1)
is_current() { [ -x .venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$wanted" ]; }

if is_current; then
    exit 0
fi
mkdir -p .cache
if command -v flock >/dev/null; then
    exec 9>.cache/env.lock
    flock 9
    if is_current; then # another run made it while we waited
        exit 0
    fi
fi

find_uv
rm -f $stamp
if ! .venv/bin/python --version >/dev/null 2>&1; then
    say "creating .venv (Python 3.11)"
    "$uv" venv --clear --python 3.11 .venv
fi
say "installing $(grep -c '==' requirements.txt) packages: about 10 GB, a minute or more with an empty package cache"
"$uv" pip sync --python .venv/bin/python --require-hashes requirements.txt
"$uv" pip install --python .venv/bin/python --no-deps --no-build-isolation --editable .
echo "$wanted" >$stamp
say "ready: .venv/bin/sglang-plt"
