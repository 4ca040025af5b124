#!/usr/bin/env bash
# Five banks with pinned keys, one of which is killed in a secure sum: `bash examples/secure/story.sh DIR`
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
address=${ADDRESS:-127.0.0.1:7070}
sites="north south east west harbour"
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

declare -A processes
agent() { # starts the agent of a bank; the first time with its join code
  atoll agent "$here/task.py:task" --site "$1" --state "agent-$1" --policy "$here/policy.toml" "${@:2}" >>"$1.log" 2>&1 &
  processes[$1]=$!
}

said() { # waits until a log has a line
  until grep -q "$2" "$1.log" 2>/dev/null; do sleep 0.05; done
}

ended() { # waits until the run has ended
  until [ "$(atoll run show prices-1 --json | python -c 'import json, sys; print(json.load(sys.stdin)["state"])')" = finished ]; do
    sleep 0.2
  done
}

echo "== the coordinator, without a run yet, and five banks, each of which makes its site key"
atoll coordinator --stay --set coordinator.listen="$address" --set coordinator.enrol=127.0.0.1:0 >coordinator.log 2>&1 &
until code=$(atoll client invite north 2>/dev/null); do sleep 0.2; done
for site in $sites; do
  [ $site = north ] || code=$(atoll client invite $site)
  agent $site --join "$code"
done
for site in $sites; do said $site "connected to"; done

echo "== north calls each of the others, and types the fingerprint that it hears"
for site in south east west harbour; do
  fingerprint=$(atoll site fingerprint --state agent-$site --json | python -c 'import json, sys; print(json.load(sys.stdin)["fingerprint"])')
  atoll site trust $site "$fingerprint" --state agent-north
done

echo "== the list goes to the others by mail; each calls north and compares one line, the fingerprint of the list"
atoll site fingerprints export banks.txt --state agent-north
for site in south east west harbour; do
  atoll site fingerprints import banks.txt --state agent-$site
done
atoll site peers --state agent-harbour

echo "== a run; west is killed when its update of round 2 is encoded, in the middle of the sum"
atoll run start "$here/run.toml"
said west "encoded the update of round 2"
disown "${processes[west]}"
kill -9 "${processes[west]}"
ended
atoll round show 2

echo "== west comes back: its secrets are gone, its promises are not, and it is in the next sums"
agent west
until [ "$(grep -c "connected to" west.log)" = 2 ]; do sleep 0.05; done
atoll run resume prices-1 --rounds 5 --set round.min_available=5
ended
atoll round show 5
atoll model export --run prices-1 --out prices.safetensors
atoll audit show agent-west/decisions/audit-*.jsonl --action secure.joined
