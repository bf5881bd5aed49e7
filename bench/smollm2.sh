#!/usr/bin/env bash
# The SmolLM2 drafters from nothing: recordings, baseline, control and carryover, acceptance along recorded answers.
#
#   TARGET=DIR PROMPTS=DIR OUT=runs/smollm2 bench/smollm2.sh [record|baseline|pair|replay|all]
#
# TARGET is what `python -m hf_carryover.smollm2` prepares, PROMPTS a folder with the evaluation prompts. A stage that
# is finished is not repeated, one that was interrupted goes on. VLLM_PYTHON is an interpreter with vLLM (recordings),
# PYTHON one with this package. Two cores take about six hours for all of it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${TARGET:?folder of the target}" "${PROMPTS:?folder of evaluation prompts}"
OUT=${OUT:-runs/smollm2}
PYTHON=${PYTHON:-python}
VLLM_PYTHON=${VLLM_PYTHON:-$PYTHON}
SEED=${SEED:-1}
# Prompts the target writes; each is answered greedily and once sampled.
N=${N:-5000}
BASELINE_STEPS=${BASELINE_STEPS:-1600}
PAIR_STEPS=${PAIR_STEPS:-300}
# Recordings kept for evaluation. With N=16 HELD_OUT=4 BASELINE_STEPS=2 PAIR_STEPS=2 PAIR_SEEDS=0 and a few prompts the whole
# script takes ten minutes.
HELD_OUT=${HELD_OUT:-100}
# Longest n-gram that the drafters look up; 0 for none. And whether carried predictions are pointed at.
NGRAM=${NGRAM:-4}
POINTER=${POINTER:-true}
LLM='{"max_model_len": 2048, "max_num_seqs": 192, "enable_chunked_prefill": false, "max_num_batched_tokens": 8192}'
export PYTHONPATH=$PWD VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-4} VLLM_ENABLE_V1_MULTIPROCESSING=0

record_with() {
    "$VLLM_PYTHON" -m hf_carryover.cli record --target "$TARGET" --engine vllm --dtype bfloat16 \
        --max_new_tokens 192 --shard_size 1024 --max_repetition 1 --llm_kwargs "$LLM" "$@"
}

record() {
    local common=(--exclude "$PROMPTS" --min_response_tokens 8 --seed "$SEED")
    record_with "${common[@]}" --output "$OUT/greedy" --self-prompts "$N" --self_prompt_temperature 0.8 \
        --self_prompt_max_tokens 192 --domains all
    record_with "${common[@]}" --output "$OUT/sampled" --prompts "$OUT/greedy/self_prompts.json" --do_sample
    # What acceptance is measured on.
    record_with --output "$OUT/eval-greedy" --prompts "$PROMPTS"
    record_with --output "$OUT/eval-sampled" --prompts "$PROMPTS" --do_sample
}

train() {
    "$PYTHON" -m hf_carryover.cli train --target "$TARGET" --recordings "$OUT/greedy" "$OUT/sampled" --bf16 \
        --use_cpu "${USE_CPU:-true}" --train_sampling_strategy group_by_length --adam_beta2 0.98 --weight_decay 0.01 \
        --fc_learning_rate_scale 0.05 --anchors_per_response 64 --per_device_train_batch_size 4 --warmup_steps 30 \
        --lr_scheduler_type linear --logging_steps 20 --save_steps 100 --save_total_limit 2 --report_to none \
        --feature_cache_dir "$OUT/features" --held_out "$HELD_OUT" "$@"
}

baseline() {
    [ -d "$OUT/baseline/drafter" ] || train --stage baseline --learning_rate 4e-4 --max_steps "$BASELINE_STEPS" \
        --num_hidden_layers 3 --block_size 7 --markov_rank 64 --draft_vocab_size 16384 --lookup_ngram_size "$NGRAM" \
        --target_layer_ids 1 8 14 20 27 29 --output_dir "$OUT/baseline"
}

# Control and carryover from the baseline in two legs: the rate falls to 0 in each, the first drafts are the baseline's.
# Fused states of this target are about 9 in size, so what is added to them for carried rows learns 300 times as fast.
pair() {
    local seed name first second
    for seed in ${PAIR_SEEDS:-0 1 2}; do
        for name in control carryover; do
            local flags=(--stage carryover --learning_rate 3e-4 --max_steps "$PAIR_STEPS" --data_seed "$seed"
                --carry_cache_dir "$OUT/bank" --first_drafter "$OUT/baseline/drafter")
            [ "$name" = control ] || flags+=(--carry true --carry_pointer "$POINTER" --carry_learning_rate_scale 300)
            first=$OUT/$name-$seed-first second=$OUT/$name-$seed
            [ -d "$first/drafter" ] || train "${flags[@]}" --carry_warmup_steps "$((PAIR_STEPS < 40 ? PAIR_STEPS : 40))" \
                --drafter "$OUT/baseline/drafter" --output_dir "$first"
            [ -d "$second/drafter" ] || train "${flags[@]}" --drafter "$first/drafter" --output_dir "$second"
        done
    done
}

replay() {
    local drafters=(baseline="$OUT/baseline/drafter")
    for seed in ${PAIR_SEEDS:-0 1 2}; do
        drafters+=("control-$seed=$OUT/control-$seed/drafter" "carryover-$seed=$OUT/carryover-$seed/drafter")
    done
    "$PYTHON" -m hf_carryover.cli replay --target "$TARGET" --drafter "${drafters[@]}" --batch_size 48 \
        --recordings greedy="$OUT/eval-greedy" sampled:1.0="$OUT/eval-sampled" --output "$OUT/replay.json"
    "$PYTHON" -m hf_carryover.evaluation.acceptance "$OUT/replay.json" --pair carryover-0 control-0 --output "$OUT/replay.md"
}

stages=("${@:-all}")
[ "${stages[0]}" = all ] && stages=(record baseline pair replay)
for stage in "${stages[@]}"; do
    case $stage in
        record | baseline | pair | replay) "$stage" ;;
        *)
            echo "error: unknown stage '$stage', expected record, baseline, pair, replay or all" >&2
            exit 2
            ;;
    esac
done
