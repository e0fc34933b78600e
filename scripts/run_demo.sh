#!/usr/bin/env bash
# Find the largest batch size of a bundled example: on the GPU if there is one, else on the CPU
# with a limit of 2 GiB. Usage: scripts/run_demo.sh [further options of `batchfinder find`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh
prepare_environment

if .venv/bin/python -W ignore -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    target=scripts/examples/train_vit.py:build_model
    options=(--device cuda --arg width=768 --arg depth=12 --arg image_size=224 --arg patch_size=16)
else
    target=scripts/examples/train_mlp.py:build_model
    options=(--device cpu --memory-limit 2GiB)
fi
echo "+ batchfinder find $target ${options[*]} $*"
exec .venv/bin/batchfinder find "$target" "${options[@]}" "$@"
