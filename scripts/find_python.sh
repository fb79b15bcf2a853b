#!/bin/sh
# Prints the path of a Python interpreter for the virtual environment: 3.12 or newer, with venv.
#
# Looked for, in this order: $PYTHON; the version in .python-version, as installed by pyenv, then by
# uv; python3.12, python3.13, python3.14 and python3 on PATH; any other version that pyenv has.
set -eu
cd "$(dirname "$0")/.."

wanted=$(cat .python-version)
without_venv=

# Prints the interpreter's own path and ends the search, if $1 will do.
try() {
    path=$("$1" -c 'import sys; sys.version_info >= (3, 12) and print(sys.executable)' 2>/dev/null) ||
        return 0
    [ -n "$path" ] || return 0
    if "$path" -c 'import ensurepip, venv' 2>/dev/null; then
        printf '%s\n' "$path"
        exit 0
    fi
    without_venv=$path
}

# Lists the patch releases of a version (such as 3.12) that pyenv has, the newest first.
pyenv_versions() {
    pyenv versions --bare 2>/dev/null | grep -E "^$1(\.[0-9]+)*\$" | sort -t . -k 2,2nr -k 3,3nr
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
    echo "PYTHON=$PYTHON is not Python 3.12 or newer with the modules venv and ensurepip." >&2
    exit 1
fi

pyenv_root=
if command -v pyenv >/dev/null; then
    pyenv_root=$(pyenv root)
    for version in $(pyenv_versions "$wanted"); do
        try "$pyenv_root/versions/$version/bin/python"
    done
fi
if command -v uv >/dev/null; then
    try "$(uv python find --system --no-project "$wanted" 2>/dev/null)"
fi
for name in python3.12 python3.13 python3.14 python3; do
    try "$name"
done
if [ -n "$pyenv_root" ]; then
    for version in $(pyenv_versions 3); do
        try "$pyenv_root/versions/$version/bin/python"
    done
fi

{
    if [ -n "$without_venv" ]; then
        echo "$without_venv lacks the modules venv and ensurepip."
        echo "Add them (on Debian and Ubuntu: apt install python3-venv)"
    else
        echo "No Python 3.12 or newer was found by pyenv, by uv or on PATH."
        echo "Install one (for example: pyenv install $wanted, or uv python install $wanted)"
    fi
    echo "or name another one: make install PYTHON=/path/to/python3"
} >&2
exit 1
