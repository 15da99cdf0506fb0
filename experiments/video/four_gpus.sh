#!/usr/bin/env bash
# Everything on four GPUs: four_gpus.sh MODELS RESULTS. With 1,500 steps it takes about five minutes of H200. Each training and each
# part of the measuring has a limit. What is there is not made again. STEPS, TUNING and SCENES change sizes, OPTIONS goes to each
# training.
models=$1 results=$2 python=${PYTHON:-python}
steps=${STEPS:-1500} tuning=${TUNING:-500} scenes=${SCENES:-128}
seconds=$((steps / 10)) # of a training; a step of the dense model takes 0.05 on H200
limit=$((seconds + 120))
mkdir -p "$models" "$results"

train() { # on a GPU
  CUDA_VISIBLE_DEVICES=$1 timeout "$limit" $python -m experiments.video train "${@:2}" --models "$models" $OPTIONS >> "$results/train-$1.log" 2>&1
}
tune() {
  train "$@" --start "$models/dense-0.pt" --steps "$tuning" --seconds 60
}
begin() {
  train "$@" --steps "$steps" --seconds "$seconds"
}

begin 0 dense &
begin 1 dense --seed 1 &
{ begin 2 window; begin 2 random; } &
{ begin 3 vsa; begin 3 sampled; } &
wait
limit=120
tune 0 dense &
tune 1 window &
{ tune 2 random; tune 2 sampled; } &
tune 3 vsa &
wait
for gpu in 0 1 2 3; do
  CUDA_VISIBLE_DEVICES=$gpu timeout 150 $python -m experiments.video measure --models "$models" --out "$results/rows-$gpu.json" \
    --part $((gpu + 1))/4 --minutes 2 --scenes "$scenes" > "$results/measure-$gpu.log" 2>&1 &
done
wait
tail -n 1 "$results"/*.log
