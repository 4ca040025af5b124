#!/usr/bin/env bash
# A run that ends when its privacy budget is spent,: `bash examples/private/story.sh DIR`
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
address=${ADDRESS:-127.0.0.1:7070}
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

value() { # a value of a command's JSON
  python -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"
}

ended() { # waits until a run has ended
  until [ "$(atoll run show "$1" --json | value state)" = finished ]; do sleep 0.2; done
}

echo "== the coordinator, without a run yet, and three clinics, each with a budget for its records"
atoll coordinator --stay --set coordinator.listen="$address" --set coordinator.enrol=127.0.0.1:0 >coordinator.log 2>&1 &
until code=$(atoll client invite university 2>/dev/null); do sleep 0.2; done
for site in university county coast; do
  [ $site = university ] || code=$(atoll client invite $site)
  policy=$here/policy.toml
  if [ $site = coast ]; then # a clinic that allows less than the others
    sed 's/epsilon_max = 3.0/epsilon_max = 2.2/' "$here/policy.toml" >coast.toml
    policy=coast.toml
  fi
  atoll agent "$here/task.py:task" --site $site --state agent-$site --join "$code" --policy "$policy" >$site.log 2>&1 &
done

echo "== the run, until its budget is spent"
atoll run start "$here/run.toml"
ended tumours-1
atoll run show tumours-1 | sed -n 1,8p
atoll round list --run tumours-1
atoll privacy show tumours-1

echo "== a second run on the same records: coast's budget is spent first, and the others train without it"
atoll run start "$here/run.toml" --set privacy.epsilon=1.3
ended tumours-2
atoll round list --run tumours-2
atoll privacy show tumours-2
atoll audit show agent-coast/decisions/audit-*.jsonl --action train.refused
