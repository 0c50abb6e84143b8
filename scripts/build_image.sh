#!/usr/bin/env bash
# Run the lines of the Dockerfile without a container daemon and a registry.
#
#   scripts/build_image.sh TARGET PYTHON [ARGUMENT ...]
#   scripts/build_image.sh cpu "$(command -v python3.12)" --volume /opt/wheels:/opt/wheels:ro
#
# The base image is made here: packages of Debian by debootstrap, and the interpreter PYTHON, with
# its version, in the place of Docker's. buildah runs the lines in chroots, and at last the image
# trains two steps. It takes root, and passes arguments on to `buildah build`. Images are in a new
# folder, removed afterwards, or in STORE, which is kept and whose layers are used again.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,${/^#\( \|$\)/!q; s/^# \{0,1\}//p}' "$0"
    exit
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

stop() { # print why nothing can be built, and exit with 2
    echo "error: $1" >&2
    exit 2
}

[[ $# -ge 2 ]] || stop "arguments must be TARGET PYTHON [ARGUMENT ...], got ${*:-nothing}"
target=$1 python=$2
shift 2
mapfile -t targets < <(sed -n 's/^FROM [a-z-]* AS //p' "$root/Dockerfile")
[[ " ${targets[*]} " == *" $target "* ]] || stop "TARGET must be one of ${targets[*]}, got $target"
version=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null) ||
    stop "PYTHON must be an interpreter, got $python"
prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
[[ $prefix != /usr ]] || stop "PYTHON must have its own folder, not Debian's /usr, got $python"
[[ $EUID -eq 0 ]] || stop "the user must be root, whom chroot takes, got $(id -un)"
for tool in buildah debootstrap; do
    command -v "$tool" >/dev/null || stop "$tool must be installed: apt-get install $tool"
done
suite=$(sed -n 's/^FROM python:.*-slim-//p' "$root/Dockerfile" | cut -d' ' -f1)

work=$(mktemp -d)
store=${STORE:-$work/store}
trap 'rm -rf "$work"' EXIT
export BUILDAH_ISOLATION=chroot
buildah() { command buildah --root "$store/images" --runroot "$store/run" "$@"; }

make_base() { # make the image $1
    local base
    debootstrap --variant=minbase \
        --include=ca-certificates,libbz2-1.0,libffi8,liblzma5,libreadline8,libsqlite3-0,libssl3,zlib1g \
        "$suite" "$work/base" >"$work/debootstrap.log" ||
        stop "debootstrap failed: $(tail -n 1 "$work/debootstrap.log")"
    tar -C "$prefix" --exclude=site-packages --exclude=__pycache__ -c bin lib |
        tar -C "$work/base/usr/local" --no-same-owner -x
    base=$(buildah from scratch)
    buildah add --quiet "$base" "$work/base" / >/dev/null
    buildah config --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin "$base"
    buildah run "$base" -- sh -c \
        "ldconfig && ln -sf python${version%.*} /usr/local/bin/python && python -m ensurepip &&
         ln -sf pip3 /usr/local/bin/pip"
    buildah commit --quiet --rm "$base" "$1"
}

name=docker.io/library/python:$version-slim-$suite
echo "== base: $name"
buildah inspect --type image "$name" &>/dev/null || make_base "$name"

echo "== target $target"
buildah build --pull-never --layers --build-arg "PYTHON=$version" --target "$target" \
    --tag "spectrain:$target" "$@" "$root"

echo "== two steps"
container=$(buildah from --pull-never "localhost/spectrain:$target")
buildah run "$container" -- python pretrain.py --config configs/tiny_sso.yaml \
    data.mock=true train.steps=2 schedule.warmup_steps=1
buildah rm "$container" >/dev/null
