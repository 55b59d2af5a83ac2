#!/bin/bash
# Models with states on a GPU: their tests, whole steps beside the limits, and beside the tier.
#   bash benchmarks/states.sh [tests] [steps] [tier] [search]
set -u
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$(mktemp -d)}
run() { bash benchmarks/uninstalled.sh python3 -P "$@" 2>&1; }
lines() { grep -aE '^\||^# |rror|warm|assed|ailed' | grep -v -- '---'; }
for part in "${@:-tests}"; do
  began=$SECONDS
  case $part in
    tests) # Those without the mark `gpu` may start no process, such as an assembler: they run again.
      for mark in "not gpu" "not gpu" gpu; do
        run -m pytest -q -p no:cacheprovider -n 12 tests/kernels/triton/test_space.py \
          tests/kernels/triton/test_delta.py tests/engine/test_device_states.py \
          tests/models/test_device_models.py -m "$mark" \
          -k "not mamba2 and (space or delta or states or lfm2 or granite4 or nemotron-h or falcon-h1 or qwen3-5)" | tail -8
      done ;;
    steps) for shape in nemotron-h-8b lfm2-2.6b falcon-h1-7b granite-4-h-small; do
        layers=; [ $shape = granite-4-h-small ] && layers="--layers 20"
        echo "# $shape $layers"
        run benchmarks/run.py steps --shape $shape $layers --rows 256 --positions 16384 \
          --decode 1x512 64x512 256x512 --mixed --prompts 8192 | lines
      done ;;
    tier) run benchmarks/run.py tier | lines ;;
    search) run benchmarks/run.py mixers --state-space --search --decode 1 64 256 --prompts 8192 | lines ;;
  esac
  echo "# $part: $((SECONDS - began)) s"
done
