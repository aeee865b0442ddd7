#!/usr/bin/env bash
# Creates .venv with the build requirements of pyproject.toml in it, on a machine that may have little more
# than Python and a C compiler. Says exactly what is missing, and as root on Debian installs it.
#
# Usage: scripts/make_venv.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
venv=.venv

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }
debian_root() { [ "$(id -u)" = 0 ] && [ -e /etc/debian_version ] && command -v apt-get >/dev/null; }
apt_install() {
    say "installing: apt-get install -y $*"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"; } >&2
}

command -v "$python" >/dev/null || fail "$python not found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3"
python=$(command -v "$python")
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || fail "$python is Python $version; statebackend needs 3.10 or newer. Name one: make PYTHON=python3.12"

if ! command -v cc >/dev/null && ! command -v gcc >/dev/null && ! command -v clang >/dev/null; then
    if debian_root; then
        apt_install gcc libc6-dev
    else
        fail "no C compiler. Install one: 'apt-get install gcc libc6-dev' (Debian), 'dnf install gcc' (Fedora), 'xcode-select --install' (macOS)"
    fi
fi

header='import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'
if ! "$python" -c "$header"; then
    if debian_root; then apt_install "python$version-dev"; fi
    "$python" -c "$header" \
        || fail "Python's headers are missing. Install them: 'apt-get install python$version-dev' (Debian), 'dnf install python3-devel' (Fedora)"
fi

# Debian splits ensurepip off into python3-venv. Where it is missing, a pip of 22.3 or newer can fill the
# environment from outside; only where there is none either does the system have to change.
has_ensurepip() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }
has_outer_pip() { "$python" -c 'import venv' 2>/dev/null && "$python" -m pip --python "$python" --version >/dev/null 2>&1; }

if ! has_ensurepip && ! has_outer_pip && debian_root; then apt_install "python$version-venv"; fi
rm -rf "$venv"
if has_ensurepip; then
    "$python" -m venv "$venv"
elif has_outer_pip; then
    "$python" -m venv --without-pip "$venv"
    "$python" -m pip --python "$venv/bin/python" install -q --disable-pip-version-check pip
else
    fail "this Python cannot make a virtual environment. Install what it lacks: 'apt-get install python$version-venv' (Debian)"
fi

"$venv/bin/python" -m pip install -q --disable-pip-version-check --upgrade 'pip>=24'
requirements=$("$venv/bin/python" - <<'PYTHON'
try:
    import tomllib
except ImportError:  # before Python 3.11
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["build-system"]["requires"]))
PYTHON
)
printf '%s\n' "$requirements" >"$venv/build-requirements.txt"
"$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$venv/build-requirements.txt"
say "created $venv with $("$venv/bin/python" --version)"
