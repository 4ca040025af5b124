#!/usr/bin/env bash
# A consortium from four CSV files to a second run: `bash examples/hospitals/story.sh DIR`
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
address=${ADDRESS:-127.0.0.1:7070}
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

ended() { # waits until a run has ended
  until [ "$(atoll run show "$1" --json | python -c 'import json, sys; print(json.load(sys.stdin)["state"])')" = finished ]; do
    sleep 1
  done
}

python "$here/make_csv.py" .

echo "== the consortium's coordinator, and four hospitals"
atoll coordinator "$here/run.toml" --stay --set coordinator.listen="$address" --set coordinator.enrol=127.0.0.1:0 \
  >coordinator.log 2>&1 &
until [ -e atoll-state/state.db ] && code=$(atoll client invite north 2>/dev/null); do sleep 1; done
for site in north south east west; do
  [ $site = north ] || code=$(atoll client invite $site)
  atoll agent "$here/task.py:task" --site $site --state agent-$site --join "$code" --set task.file=$site.csv \
    >$site.log 2>&1 &
done

echo "== an early stop at the best AUC; each hospital's own view"
ended hospitals-1
atoll run show hospitals-1 --sites
atoll model export --best --out best.safetensors

echo "== ten more rounds with a lower rate"
version=$(atoll run show hospitals-1 --json | python -c 'import json, sys; print(json.load(sys.stdin)["version"])')
atoll run resume hospitals-1 --rounds $((version + 10)) --set local.lr=0.02 --set stop.patience=1000
ended hospitals-1
atoll run show hospitals-1 | sed -n 1,12p

echo "== a second run, which starts from the best version of the first"
atoll run start "$here/run.toml" --set name=second --set model.start=run:hospitals-1@best --set rounds=3
ended second-1
atoll model list --run second-1
