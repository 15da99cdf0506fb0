#!/usr/bin/env bash
# A model trained at 65,536 tokens, and choosers on it: at_64k.sh FOLDER. Trains on all GPUs for MINUTES, then divides the rows over
# them. On two H200 it takes six and a half minutes. A model needs more than three minutes of training there to look far. Text: the
# packages that are installed; rows are measured on the standard library.
set -e
folder=$1 python=${PYTHON:-python} gpus=$(nvidia-smi -L | wc -l) length=${LENGTH:-65536}
mkdir -p "$folder"

torchrun --nproc-per-node "$gpus" -m examples.train_lm train --preset 150M --mask causal --length "$length" --step-tokens $((length * gpus)) \
  --minutes "${MINUTES:-3}" --warmup 40 --learning-rate 2e-3 --most-bytes 150000000 --data "$folder/data" --out "$folder/run" --windows 4 \
  --evaluate-every 100 > "$folder/train.log" 2>&1
$python -m examples.train_lm export "$folder/run" "$folder/model" --data "$folder/data"
$python -c "import glob, sysconfig; print('\n'.join(open(f, errors='replace').read() for f in sorted(glob.glob(sysconfig.get_path('stdlib') + '/*.py'))[:120]))" \
  > "$folder/python.txt"

row=0
declare -A rows
for name in dense "window local 0.15" "true_mass budget 0.15" "sampled(8) budget 0.15" "sampled(16) budget 0.15" "sampled(32) budget 0.15" \
  "sampled(16) budget 0.1" "sampled(16) budget 0.25" "sampled(16) mass 0.15" "sampled(8) keep 0.15" "antidiagonal(8) budget 0.15" \
  "pooled budget 0.15"; do
  rows[$((row % gpus))]+="--rows|$name|"
  row=$((row + 1))
done
for ((gpu = 0; gpu < gpus; gpu++)); do
  IFS='|' read -ra options <<< "${rows[$gpu]}"
  CUDA_VISIBLE_DEVICES=$gpu timeout "${SECONDS_OF_ROWS:-150}" $python -m experiments.choosers measure "$folder/model" --text "$folder/python.txt" \
    --length "$length" --windows 2 --needles 8 "${options[@]}" --out "$folder/rows-$gpu.json" > "$folder/rows-$gpu.log" 2>&1 &
done
wait
tail -n 4 "$folder"/rows-*.log
