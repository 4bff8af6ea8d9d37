#!/bin/bash
# unpack.sh WHEEL   on the machine: put the slices in $BUNDLE/slices together, unpack them, and install quantkit's wheel
# Python's own packages stay as they are: $BUNDLE/site comes before them in PYTHONPATH (env.sh). Without slices only the wheel.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
nvidia=$(env -u PYTHONPATH python3 -c 'import nvidia; print(*nvidia.__path__)'); . "$here/env.sh"; begun=$SECONDS
if [ -d "$BUNDLE/slices" ]; then
  mkdir -p "$SITE/nvidia"; cat "$BUNDLE"/slices/* | tar -x -C "$BUNDLE"; rm -r "$BUNDLE/slices"
  for stream in "$BUNDLE"/*.tar.xz; do tar -xJf "$stream" -C "$SITE" && rm "$stream" & jobs+=($!); done
  for job in "${jobs[@]}"; do wait "$job"; done
  echo "unpacked after $((SECONDS - begun)) s"
  # CUDA's libraries from the machine: torch looks for them beside itself.
  for library in "$nvidia"/*; do [ -e "$SITE/nvidia/${library##*/}" ] || ln -s "$library" "$SITE/nvidia/"; done
  python3 -m compileall -q -j 0 "$SITE" >/dev/null 2>&1 || true
fi
rm -rf "$BUNDLE/quantkit"; python3 -m pip install -q --no-deps --no-index --disable-pip-version-check --target "$BUNDLE/quantkit" "$1"
echo "ready after $((SECONDS - begun)) s"
