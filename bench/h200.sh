#!/usr/bin/env bash
# The paper's serving protocol on one H200, from an empty machine to the final tables.
#
#   PROMPTS=DIR QWEN3_4B_CONTROL=REPO QWEN3_4B_CARRYOVER=REPO [GEMMA4_12B_CONTROL=REPO GEMMA4_12B_CARRYOVER=REPO] \
#       bench/h200.sh
#
# PROMPTS holds the prompt sets, one JSONL file each (bench/README.md). A drafter is a folder of
# `CarryoverDrafter.save_pretrained`, local or on the Hub: CONTROL was trained as long as CARRYOVER, without carried
# rows; QWEN3_4B_BASELINE and GEMMA4_12B_BASELINE, if given, are drafters before either. A target without drafters is
# left out.
# Needs Python 3.10 or newer, an NVIDIA driver and the Hub (HF_TOKEN where a model is gated). A finished table in OUT is
# not measured again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${PROMPTS:?folder of prompt sets}"
OUT=${OUT:-outputs/h200}
PYTHON=${PYTHON:-python3}
VLLM=${VLLM:-vllm==0.33.0}
QWEN3_4B=${QWEN3_4B:-Qwen/Qwen3-4B}
GEMMA4_12B=${GEMMA4_12B:-google/gemma-4-12B-it}
TOKENS=${TOKENS:-1024}
NUM_PROMPTS=${NUM_PROMPTS:-20}
REPETITIONS=${REPETITIONS:-5}
TEMPERATURES=${TEMPERATURES:-0 1}
VENV=${VENV:-.venv-h200}

[[ -n ${QWEN3_4B_CARRYOVER:-}${GEMMA4_12B_CARRYOVER:-} ]] || {
    echo "error: name at least one drafter, QWEN3_4B_CARRYOVER or GEMMA4_12B_CARRYOVER" >&2; exit 1; }

if [[ ! -e $VENV/.ready ]]; then
    "$PYTHON" -m venv --clear "$VENV"
    "$VENV/bin/python" -m pip install --quiet --upgrade pip
    "$VENV/bin/python" -m pip install --quiet "$VLLM" -e ".[demo]"
    touch "$VENV/.ready"
fi
mkdir -p "$OUT"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv > "$OUT/gpu.csv"

# measure NAME TARGET BASELINE CONTROL CARRYOVER
measure() {
    local name=$1 target=$2 temperature drafters=()
    [[ -n $5 ]] || { echo "== $name: no drafter, left out"; return 0; }
    [[ -z $3 ]] || drafters+=(--drafter "baseline=$3")
    [[ -z $4 ]] || drafters+=(--drafter "control=$4")
    drafters+=(--drafter "carryover=$5")
    for temperature in $TEMPERATURES; do
        local output=$OUT/$name-t$temperature.json
        [[ ! -e ${output%.json}.md ]] || { echo "== $output is there"; continue; }
        echo "== $name, temperature $temperature"
        "$VENV/bin/python" -m bench.vllm --target "$target" "${drafters[@]}" --prompts "$PROMPTS" \
            --num_prompts "$NUM_PROMPTS" --num_mixed 64 --max_new_tokens "$TOKENS" --repetitions "$REPETITIONS" \
            --concurrency 1 2 4 8 16 32 --temperature "$temperature" --memory_share 0.9 \
            --serve '["--max-model-len", "8192", "--dtype", "bfloat16"]' --output "$output"
    done
}

measure qwen3-4b "$QWEN3_4B" "${QWEN3_4B_BASELINE:-}" "${QWEN3_4B_CONTROL:-}" "${QWEN3_4B_CARRYOVER:-}"
measure gemma4-12b "$GEMMA4_12B" "${GEMMA4_12B_BASELINE:-}" "${GEMMA4_12B_CONTROL:-}" "${GEMMA4_12B_CARRYOVER:-}"
for table in "$OUT"/*.md; do echo; echo "# $(basename "$table" .md)"; cat "$table"; done
