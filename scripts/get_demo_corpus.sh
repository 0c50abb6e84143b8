#!/usr/bin/env bash
# Create examples/data/*.txt.xz from Debian packages, or verify existing files.
#
#   scripts/get_demo_corpus.sh [FOLDER]           create the files (default: examples/data)
#   scripts/get_demo_corpus.sh --check [FOLDER]   verify the sha256 of the texts (requires only xz)
#
# To create the files: apt-get install bible-kjv bible-kjv-text jargon-text dict-devil xz-utils
# The texts must match the sha256 below with any package version. See examples/data/SOURCES.md.
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
  command -v bible >/dev/null || fail "the command 'bible' is missing: apt-get install bible-kjv bible-kjv-text"
  # Lines look like 'Ge1:1 In the beginning ...'. Strip the reference, which is not prose, and add a
  # blank line before the first verse of each chapter.
  bible -f "Ge1:1-Re22:21" |
    awk '{ if (NR > 1 && $1 ~ /:1$/) print ""; sub(/^[^ ]+ /, ""); print }'
}

jargon() {
  local source=/usr/share/doc/jargon-text/jargon.txt.gz
  [ -r "$source" ] || fail "the file $source is missing: apt-get install jargon-text"
  gzip -dc "$source"
}

devils_dictionary() {
  local source=/usr/share/dictd/devil.dict.dz
  [ -r "$source" ] || fail "the file $source is missing: apt-get install dict-devil"
  gzip -dc <"$source"
}

check() {  # check FILE SHA256: check that the text in a .txt.xz file has this sha256
  local found
  [ -r "$1" ] || fail "the file $1 is missing"
  found=$(xz -dc "$1" | sha256sum | cut -d' ' -f1) || fail "$1 is not a readable xz file"
  [ "$found" = "$2" ] || fail "the text in $1 must have sha256 $2, got $found"
  echo "ok: $1"
}

checking=false
if [ "${1:-}" = --check ]; then checking=true; shift; fi
folder=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/examples/data}

if ! $checking; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  for name in "${SETS[@]}"; do
    # With a single thread and a single block, all xz versions produce identical output.
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
