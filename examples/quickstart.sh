#!/usr/bin/env bash
# The whole road on one machine without a GPU: raw documents -> tokenizer -> .bin/.idx -> pretraining at TP 2 x PP 2 on four
# processes -> evaluation -> Hugging Face folder -> generated text.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash examples/quickstart.sh [--fresh] [--iterations N] [--help]
  --fresh         start over: remove what an earlier quickstart left in OUT
  --iterations N  optimizer steps of each model (default 300); below 300 the bigram comparison is printed, not demanded
environment: OUT  folder for everything that is made (default: quickstart-run in the checkout)
Started again, it keeps the steps that are done and continues an interrupted training.
TEXT
}

fresh=false iterations=300 full_length=300
while (($#)); do
    case "$1" in
    --fresh) fresh=true ;;
    --iterations)
        [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || { echo "error: --iterations needs a number above 0" >&2 && exit 2; }
        iterations=$2
        shift
        ;;
    --help) usage && exit 0 ;;
    *) echo "error: unknown option '$1' (see --help)" >&2 && exit 2 ;;
    esac
    shift
done

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${OUT:-$root/quickstart-run}"
mkdir -p "$out" && out="$(cd "$out" && pwd)"
cd "$root"
python=.venv/bin/python
export OMP_NUM_THREADS=1
begun=$SECONDS

say() { printf '\n[%s/8] %s\n' "$1" "$2"; }

say 1 "environment"
bash examples/setup.sh
begun=$SECONDS
if $fresh; then
    rm -rf "$out"/{corpus,data,simplenorm,qknorm,simplegpt-hf,tokenizer.model,tokenizer.vocab,iterations}
fi
if [[ -f "$out/iterations" && "$(<"$out/iterations")" != "$iterations" ]]; then
    echo "error: $out holds a run of $(<"$out/iterations") iterations, not $iterations: add --fresh, or choose another OUT" >&2
    exit 1
fi
echo "$iterations" >"$out/iterations"

say 2 "corpus: Python's standard library, a document per module"
$python examples/standard_library_corpus.py "$out/corpus"

say 3 "tokenizer: SentencePiece with Llama-2's settings, 2,048 pieces"
[[ -f "$out/tokenizer.model" ]] ||
    $python tools/train_tokenizer.py --input "$out/corpus/train.jsonl" --vocab-size 2048 --output "$out/tokenizer"
tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$out/tokenizer.model")

say 4 "dataset: .bin and .idx by two workers"
mkdir -p "$out/data"
for part in train validation; do
    [[ -f "$out/data/${part}_text_document.idx" ]] ||
        $python tools/preprocess_data.py --input "$out/corpus/$part.jsonl" --output-prefix "$out/data/$part" \
            "${tokenizer[@]}" --append-eod --workers 2
done

pretrain() { # placement
    local settings=(
        --model llama2-cpu --norm-placement "$1" --fp32
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
        --train-data-path "$out/data/train_text_document" --valid-data-path "$out/data/validation_text_document"
        "${tokenizer[@]}" --seq-length 128 --micro-batch-size 8 --global-batch-size 16
        --train-iters "$iterations" --lr 3e-3 --lr-warmup-iters $((iterations / 10)) --eval-iters 8
        --save "$out/$1" --save-interval 100 --log-dir "$out/$1" --resume
    )
    # metrics.jsonl has every iteration; the terminal shows the first and every 20th
    $python -m torch.distributed.run --standalone --nproc-per-node 4 -m megatron_simple.pretrain "${settings[@]}" |
        awk '!/^iteration/ || /^iteration +(1|[0-9]*[02468]0)\// { print; fflush() }'
}

evaluate() { # placement
    $python tools/evaluate.py --load "$out/$1" --data-path "$out/data/validation_text_document" --seq-length 128 \
        --micro-batch-size 16 | tail -n 1 | tee "$out/$1/evaluation.json"
}

say 5 "pretraining at TP 2 x PP 2, four processes: SimpleGPT, then prenorm with QKNorm"
pretrain simplenorm
pretrain qknorm

say 6 "evaluation on the held-out modules, and a bigram model of the same training tokens"
evaluate simplenorm
evaluate qknorm
$python examples/bigram_perplexity.py "$out/data/train_text_document" "$out/data/validation_text_document" --seq-length 128 |
    tee "$out/bigram.json"

say 7 "export to a Hugging Face folder"
rm -rf "$out/simplegpt-hf"
$python tools/checkpoint_to_hf.py --load "$out/simplenorm" --output "$out/simplegpt-hf"

say 8 "text written by the exported model"
$python tools/generate.py --load "$out/simplegpt-hf" --prompt 'class Queue:
    def __init__(self' --max-new-tokens 100 --temperature 0.7 --top-p 0.9

echo
demand=()
((iterations < full_length)) || demand=(--demand)
$python examples/quickstart_table.py "$out" --seconds $((SECONDS - begun)) "${demand[@]}"
