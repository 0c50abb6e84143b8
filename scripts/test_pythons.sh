#!/usr/bin/env bash
# Run the unit tests on other versions of Python, each in an environment of its own.
#
#   scripts/test_pythons.sh 3.12 3.13
#
# An interpreter is taken from PATH, uv or pyenv. `make setup` makes the environment .venv-VERSION,
# with PIP_ARGS. A version that nobody has is said, and the exit code is then 2.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

interpreter() { # print the path of an interpreter of version $1
    local found
    for found in "$(command -v "python$1")" "$(uv python find "$1" 2>/dev/null)" \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if [[ $("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$1" ]]; then
            echo "$found"
            return
        fi
    done
    return 1
}

[[ $# -gt 0 ]] || set -- 3.12 3.13
for version; do
    if [[ ! $version =~ ^3\.(1[1-9]|[2-9][0-9])$ ]]; then
        echo "error: versions must be 3.11 or newer, such as 3.12, got $version" >&2
        exit 2
    fi
done
absent=()
for version; do
    if python=$(interpreter "$version"); then
        make setup BASE_PYTHON="$python" VENV=".venv-$version"
        make test-unit PYTHON=".venv-$version/bin/python"
    else
        absent+=("$version")
    fi
done
for version in ${absent[@]+"${absent[@]}"}; do
    echo "Python $version is not tested: no python$version on PATH, in uv or in pyenv" >&2
done
[[ ${#absent[@]} -eq 0 ]] || exit 2
