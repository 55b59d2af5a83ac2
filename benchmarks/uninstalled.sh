#!/usr/bin/env bash
# Runs a command with this checkout as the packages tokenpod and tokenpod_client, on a machine where nothing can be
# installed: bash benchmarks/uninstalled.sh python3 -P -m pytest -m gpu tests/kernels tests/engine tests/models
# With TOKENPOD_FOLDER it is another checkout. `benchmarks/run.py` does this by itself where it finds no tokenpod.
set -euo pipefail
root=${TOKENPOD_FOLDER:-$(cd "$(dirname "$0")/.." && pwd)}
site=$(mktemp -d)
if [ -d "$root/src/tokenpod" ]; then
  packages=$root/src
else
  packages=$site
  mkdir "$site/tokenpod" "$site/tokenpod_client"
  for each in "$root"/tokenpod/*.py; do ln -s "$each" "$site/tokenpod/"; done
  for each in "$root"/client/tokenpod_client/*.py; do ln -s "$each" "$site/tokenpod_client/"; done
  for folder in commands core engine kernels models scheduler service; do ln -s "$root/$folder" "$site/tokenpod/$folder"; done
  for folder in cli protos; do ln -s "$root/$folder" "$site/tokenpod_client/$folder"; done
fi
# The command line finds the server's commands by an entry point, and both packages their versions.
for name in tokenpod tokenpod_client; do
  mkdir "$site/$name-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: 0\n' "${name/_/-}" > "$site/$name-0.dist-info/METADATA"
done
printf '[tokenpod.commands]\nserver = tokenpod.commands:COMMANDS\n' > "$site/tokenpod-0.dist-info/entry_points.txt"
export TOKENPOD_UNINSTALLED=1 PYTHONPATH="$packages:$site${PYTHONPATH:+:$PYTHONPATH}"
unset TOKENPOD_FOLDER
exec "$@"
