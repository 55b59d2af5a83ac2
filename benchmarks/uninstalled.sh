#!/usr/bin/env bash
# Runs a command with this checkout as the packages tokenpod and tokenpod_client, on a machine where nothing can be
# installed: bash benchmarks/uninstalled.sh python3 -P -m pytest -m gpu tests/kernels tests/engine tests/models
set -euo pipefail
cd "$(dirname "$0")/.."
site=$(mktemp -d)
mkdir "$site/tokenpod" "$site/tokenpod_client"
for each in tokenpod/*.py; do ln -s "$PWD/$each" "$site/tokenpod/"; done
for each in client/tokenpod_client/*.py; do ln -s "$PWD/$each" "$site/tokenpod_client/"; done
for folder in commands core engine kernels models scheduler service; do ln -s "$PWD/$folder" "$site/tokenpod/$folder"; done
for folder in cli protos; do ln -s "$PWD/$folder" "$site/tokenpod_client/$folder"; done
for name in tokenpod tokenpod_client; do
  mkdir "$site/$name-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: 0\n' "${name/_/-}" > "$site/$name-0.dist-info/METADATA"
done
printf '[tokenpod.commands]\nserver = tokenpod.commands:COMMANDS\n' > "$site/tokenpod-0.dist-info/entry_points.txt"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
"$@"
