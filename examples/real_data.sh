#!/bin/sh
# Plan public data sets with the command line alone: profile, plan, explain, picture.
#     examples/real_data.sh FOLDER_OF_THE_DATA OUTPUT_FOLDER
# FOLDER_OF_THE_DATA holds globo_clicks.parquet, scarab_recs.parquet and ecommerce_orm_busy.parquet.
set -eu
data=$1 out=$2
mkdir -p "$out"
cluster="--cluster a100-4x8-roce"
show() { printf '\n$ %s\n' "$*" | sed "s|$data/||g; s|$out/||g"; "$@"; }

echo "## Globo.com: news items and users"
show flexshard profile "$data/globo_clicks.parquet" --column item_id --sample-key user_id --holdout 0.1 --name items -o "$out/items.profile.parquet"
show flexshard profile "$data/globo_clicks.parquet" --column user_id --sample-key session_id --holdout 0.1 --name users -o "$out/users.profile.parquet"
show flexshard job "$out/items.profile.parquet" "$out/users.profile.parquet" $cluster --batch-size 4096 --dim 256 -o "$out/globo.yaml"
show flexshard plan "$out/globo.yaml" -o "$out/globo.json"
show flexshard explain "$out/globo.json" items
show flexshard explain "$out/globo.json" users
show flexshard compare "$out/globo.yaml" --no-torchrec
show flexshard pareto "$out/globo.yaml" -o "$out/globo.png"

echo; echo "## Scarab: the cache of a recommendation service, raw 64-bit keys"
show flexshard profile "$data/scarab_recs.parquet" --column key --hash splitmix64 --rows 1048576 --holdout 0.1 -o "$out/scarab.profile.parquet"
show flexshard job "$out/scarab.profile.parquet" $cluster --batch-size 65536 --dim 256 -o "$out/scarab.yaml"
show flexshard plan "$out/scarab.yaml" -o "$out/scarab.json"
show flexshard explain "$out/scarab.json"
show flexshard pareto "$out/scarab.yaml" -o "$out/scarab.png"

echo; echo "## E-commerce: 30 tables in one file"
show flexshard profile "$data/ecommerce_orm_busy.parquet" --column entity_id --by table_id -o "$out/ecommerce"
show flexshard job "$out"/ecommerce/*.profile.parquet $cluster --batch-size 65536 --dim 256 -o "$out/ecommerce.yaml"
show flexshard plan "$out/ecommerce.yaml" -o "$out/ecommerce.json"
show flexshard explain "$out/ecommerce.json" 12
show flexshard compare "$out/ecommerce.yaml" --no-torchrec
show flexshard pareto "$out/ecommerce.yaml" -o "$out/ecommerce.png"
show flexshard plot skew "$out/ecommerce.yaml" -o "$out/ecommerce_skew.png"
