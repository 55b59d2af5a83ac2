#!/usr/bin/env bash
# Runs a command with this checkout as the package tokenpod, on a machine where nothing can be installed:
# bash benchmarks/uninstalled.sh python3 -P -m pytest -m gpu tests/kernels tests/engine tests/models
set -euo pipefail
cd "$(dirname "$0")/.."
site=$(mktemp -d)
mkdir "$site/tokenpod"
for each in tokenpod/*.py; do ln -s "$PWD/$each" "$site/tokenpod/"; done
for folder in cli commands core engine kernels models protos scheduler service; do ln -s "$PWD/$folder" "$site/tokenpod/$folder"; done
mkdir "$site/tokenpod-0.dist-info"
printf 'Metadata-Version: 2.1\nName: tokenpod\nVersion: 0\n' > "$site/tokenpod-0.dist-info/METADATA"
printf '[tokenpod.commands]\nserver = tokenpod.commands:COMMANDS\n' > "$site/tokenpod-0.dist-info/entry_points.txt"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
"$@"
