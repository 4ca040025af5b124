#!/usr/bin/env bash
# LoRA with a guarantee for each row, in secure sums of three pinned sites: `bash examples/adapters/story.sh DIR`
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
address=${ADDRESS:-127.0.0.1:7070}
sites="south east west"
export TINY_LLAMA=$PWD/base # on one machine all have it in one place
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

value() { # a value of a command's JSON
  python -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"
}

echo "== the coordinator, without a run yet, the base, which every site has, and three sites, each with its site key"
atoll coordinator --stay --set coordinator.listen="$address" --set coordinator.enrol=127.0.0.1:0 >coordinator.log 2>&1 &
python "$here/make_base.py" base 60 2>/dev/null
until code=$(atoll client invite south 2>/dev/null); do sleep 0.2; done
for site in $sites; do
  [ $site = south ] || code=$(atoll client invite $site)
  atoll agent "$here/task.py:task" --site $site --state agent-$site --join "$code" --policy "$here/policy.toml" >$site.log 2>&1 &
done
for site in $sites; do
  until grep -q "connected to" $site.log; do sleep 0.1; done
done

echo "== south hears the others' fingerprints on the telephone; they get its list and compare one line"
for site in east west; do
  atoll site trust $site "$(atoll site fingerprint --state agent-$site --json | value fingerprint)" --state agent-south
done
atoll site fingerprints export sites.txt --state agent-south
for site in east west; do atoll site fingerprints import sites.txt --state agent-$site; done

echo "== the run: noise in each step at the sites, and sums that show no update"
atoll run start "$here/private.toml"
until [ "$(atoll run show adapters-1 --json | value state)" = finished ]; do sleep 0.2; done
atoll run show adapters-1 | sed -n 1,8p
atoll round list --run adapters-1
atoll round show 4
atoll privacy show adapters-1
atoll site budgets --state agent-south --policy "$here/policy.toml"
atoll model export --peft adapter
