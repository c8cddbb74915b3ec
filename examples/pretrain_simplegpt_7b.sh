#!/usr/bin/env bash
# Pretrains SimpleGPT 7B (Llama-2's shape, arXiv 2602.01212) on one node or many: run it on every node with its own NODE_RANK.
# Sizes and recipe live in megatron_simple/zoo.py; this file holds the cluster's choices only.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: [VARIABLE=value ...] bash examples/pretrain_simplegpt_7b.sh [--dry-run] [pretrain's flags; later ones win]
  --dry-run    print the command and exit; DATA, TOKENIZER and MASTER_ADDR may be missing

  NNODES 1         nodes                        DATA         dataset prefix (P_text_document, without .bin)
  NODE_RANK 0      this node's number           TOKENIZER    SentencePiece model that made it
  MASTER_ADDR      node 0's address             OUT          checkpoints and logs (runs/NORM-7b)
  MASTER_PORT 29500                             NORM         simplenorm | qknorm | prenorm (simplenorm)
  GPUS 8           processes per node           RECIPE       paper | code: the text's or the released code's schedule (paper)
  TP 2  PP 1  ZERO 1   layout; data parallelism takes the rest: NNODES x GPUS / (TP x PP), which must divide 192 / MICRO
  MICRO 2          samples per forward pass
TEXT
}

dry_run=false
more=()
for argument in "$@"; do
    case "$argument" in
    --dry-run) dry_run=true ;;
    --help) usage && exit 0 ;;
    *) more+=("$argument") ;;
    esac
done

NNODES="${NNODES:-1}" NODE_RANK="${NODE_RANK:-0}" MASTER_PORT="${MASTER_PORT:-29500}" GPUS="${GPUS:-8}"
TP="${TP:-2}" PP="${PP:-1}" ZERO="${ZERO:-1}" MICRO="${MICRO:-2}"
NORM="${NORM:-simplenorm}" RECIPE="${RECIPE:-paper}" OUT="${OUT:-runs/$NORM-7b}"
((NNODES > 1)) || MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
if $dry_run; then
    DATA="${DATA:-DATA}" TOKENIZER="${TOKENIZER:-TOKENIZER}" MASTER_ADDR="${MASTER_ADDR:-MASTER_ADDR}"
fi
for name in DATA TOKENIZER MASTER_ADDR; do
    [[ -n "${!name:-}" ]] || { echo "error: set $name (see --help)" >&2 && exit 2; }
done

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
launch=(
    "${PYTHON:-$root/.venv/bin/python}" -m torch.distributed.run
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS"
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
)
settings=(
    --model llama2-7b --recipe "$RECIPE" --norm-placement "$NORM" --bf16
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" --zero-stage "$ZERO" --micro-batch-size "$MICRO"
    --data-path "$DATA" --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER"
    --save "$OUT" --save-interval 500 --keep-last 3 --resume
    --log-dir "$OUT" --log-interval 10 --eval-interval 500
)
command=("${launch[@]}" -m megatron_simple.pretrain "${settings[@]}" "${more[@]}")
if $dry_run; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec "${command[@]}"
