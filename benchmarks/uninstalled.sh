#!/usr/bin/env bash
# Runs a command with this checkout as the packages tokenpod and tokenpod_client, on a machine where nothing can be
# installed: bash benchmarks/uninstalled.sh python3 -P -m pytest -m gpu tests/kernels tests/engine tests/models
set -euo pipefail
cd "$(dirname "$0")/.."
site=$(mktemp -d)
for name in tokenpod tokenpod_client; do
  mkdir "$site/$name-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: 0\n' "${name/_/-}" > "$site/$name-0.dist-info/METADATA"
done
printf '[tokenpod.commands]\nserver = tokenpod.commands:COMMANDS\n' > "$site/tokenpod-0.dist-info/entry_points.txt"
export PYTHONPATH="$PWD/src:$site${PYTHONPATH:+:$PYTHONPATH}"
"$@"
