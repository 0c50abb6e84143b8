#!/usr/bin/env bash
# Make examples/data/*.txt.xz from Debian packages, or check the existing files.
#
#   scripts/get_demo_corpus.sh [FOLDER]           make them (default: examples/data)
#   scripts/get_demo_corpus.sh --check [FOLDER]   check the sha256 of the texts; needs xz only
#
# Making them needs: apt-get install bible-kjv bible-kjv-text jargon-text dict-devil xz-utils
# The texts must have the sha256 below, whatever the versions of the packages. See examples/data/SOURCES.md.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,${/^#\( \|$\)/!q; s/^# \{0,1\}//p}' "$0"
  exit
fi
export LC_ALL=C.UTF-8

declare -A TEXT_SHA256=(
  [kjv]=82a24e4e23c644fe579ed387b20e54eb529cc0a87a25e0810064edb2216780c2
  [jargon]=40dfb4b98191a670a09a183d5798d50f243d23fdbd1495dcc0aca2ce5895ba97
  [devils_dictionary]=703d1225d2fb927653bfd8b00e4e96938e0b630c6023edd26702ac6ed50383f8
)
SETS=(kjv jargon devils_dictionary)

fail() { echo "error: $*" >&2; exit 2; }

kjv() {
  command -v bible >/dev/null || fail "no command 'bible': apt-get install bible-kjv bible-kjv-text"
  # Every line is 'Ge1:1 In the beginning ...'. The reference is removed, since it is not prose; a
  # blank line is added before each chapter's first verse, to separate chapters.
  bible -f "Ge1:1-Re22:21" |
    awk '{ if (NR > 1 && $1 ~ /:1$/) print ""; sub(/^[^ ]+ /, ""); print }'
}

jargon() {
  local source=/usr/share/doc/jargon-text/jargon.txt.gz
  [ -r "$source" ] || fail "no file $source: apt-get install jargon-text"
  gzip -dc "$source"
}

devils_dictionary() {
  local source=/usr/share/dictd/devil.dict.dz
  [ -r "$source" ] || fail "no file $source: apt-get install dict-devil"
  gzip -dc <"$source"
}

check() {  # check FILE EXPECTED: FILE is a .txt.xz
  local found
  [ -r "$1" ] || fail "no file $1"
  found=$(xz -dc "$1" | sha256sum | cut -d' ' -f1) || fail "$1 is not a readable xz file"
  [ "$found" = "$2" ] || fail "the text in $1 has sha256 $found, expected $2"
  echo "ok: $1"
}

checking=false
if [ "${1:-}" = --check ]; then checking=true; shift; fi
folder=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/examples/data}

if ! $checking; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  for name in "${SETS[@]}"; do
    # One thread and one block make each version of xz always write the same bytes.
    "$name" | xz -9e --threads=1 --check=crc64 >"$scratch/$name.txt.xz"
    check "$scratch/$name.txt.xz" "${TEXT_SHA256[$name]}" >/dev/null
  done
  mkdir -p "$folder"
  for name in "${SETS[@]}"; do
    chmod 644 "$scratch/$name.txt.xz"
    mv "$scratch/$name.txt.xz" "$folder/"
  done
fi
for name in "${SETS[@]}"; do check "$folder/$name.txt.xz" "${TEXT_SHA256[$name]}"; done
