#!/usr/bin/env bash
# Build a Dockerfile target without a container daemon or registry, and test the image.
#
#   scripts/build_image.sh TARGET PYTHON [ARGUMENT ...]
#   scripts/build_image.sh cpu "$(command -v python3.12)" --volume /opt/wheels:/opt/wheels:ro
#
# The base image is not pulled from Docker Hub. It is assembled from Debian packages (debootstrap) and
# the interpreter PYTHON, which also sets the image's Python version. buildah runs the Dockerfile in
# chroots, which requires root, and the finished image is tested by training for two steps. Each
# ARGUMENT is passed on to `buildah build`. If STORE is set, the images are kept in that folder, and
# later builds reuse their layers. Otherwise they are built in a temporary folder and then removed.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,${/^#\( \|$\)/!q; s/^# \{0,1\}//p}' "$0"
    exit
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

stop() { # print an error and exit with 2
    echo "error: $1" >&2
    exit 2
}

[[ $# -ge 2 ]] || stop "arguments must be TARGET PYTHON [ARGUMENT ...], got ${*:-nothing}"
target=$1 python=$2
shift 2
mapfile -t targets < <(sed -n 's/^FROM [a-z-]* AS //p' "$root/Dockerfile")
[[ " ${targets[*]} " == *" $target "* ]] || stop "TARGET must be one of ${targets[*]}, got $target"
version=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null) ||
    stop "PYTHON must be a Python interpreter, got $python"
prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
[[ $prefix != /usr ]] || stop "PYTHON must not be installed in /usr, got $python"
[[ $EUID -eq 0 ]] || stop "chroot requires the user root, got $(id -un)"
for tool in buildah debootstrap; do
    command -v "$tool" >/dev/null || stop "$tool must be installed: apt-get install $tool"
done
suite=$(sed -n 's/^FROM python:.*-slim-//p' "$root/Dockerfile" | cut -d' ' -f1)

work=$(mktemp -d)
store=${STORE:-$work/store}
trap 'rm -rf "$work"' EXIT
export BUILDAH_ISOLATION=chroot
buildah() { command buildah --root "$store/images" --runroot "$store/run" "$@"; }

make_base() { # build the base image and name it $1
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
