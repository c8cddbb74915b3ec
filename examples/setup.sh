#!/usr/bin/env bash
# Makes .venv in the checkout with everything in it; returns at once where that has been done and nothing has changed.
#   bash examples/setup.sh        PYTHON=/path/to/python3 chooses the interpreter (3.11 or newer)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
stamp=.venv/installed-from

die() {
    echo "error: $*" >&2
    exit 1
}

# What an installation follows from: a change in any of these asks for a new one.
fingerprint() {
    cat requirements.txt setup.py pyproject.toml csrc/* | cksum
}

if [[ -f "$stamp" && "$(cat "$stamp")" == "$(fingerprint)" ]]; then
    exit 0
fi
command -v "$python" >/dev/null || die "no $python on this machine: install Python 3.11 or newer, or set PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$("$python" --version) is too old: Python 3.11 or newer is needed (set PYTHON=/path/to/python3)"
"$python" -c 'import venv, ensurepip' 2>/dev/null || die "$python has no venv module: install it (Debian: python3-venv)"
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null ||
    die "no C++ compiler on this machine: install one (Debian: g++), or set CXX"

echo "setting up .venv (some minutes on a new machine; log: .venv/setup.log)"
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
{
    .venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
    .venv/bin/python -m pip install --disable-pip-version-check --no-deps -e .
} >.venv/setup.log 2>&1 || {
    tail -n 20 .venv/setup.log >&2
    die "the installation failed; the whole log is .venv/setup.log"
}
fingerprint >"$stamp"
