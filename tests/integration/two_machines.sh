#!/usr/bin/env bash
# Two machines, played by two network namespaces with addresses of their own: trainer and Redis in
# one, a runtime with its server and its sandbox in the other. All that they share is a folder.
#
#     sudo tests/integration/two_machines.sh FOLDER [SETTINGS OF agentloop train ...]
#
# What a person would do is between the two lines; docs/several-machines.md says why.
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1"); shift
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
here=al-trainer-$$ there=al-runtime-$$ subnet=10.213.$((RANDOM % 256))
pids=()

cleanup() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait
  ip netns del "$here" 2>/dev/null || true
  ip netns del "$there" 2>/dev/null || true
}
trap cleanup EXIT
trap 'exit 143' TERM INT

ip netns add "$here"
ip netns add "$there"
ip link add name eth0 netns "$here" type veth peer name eth0 netns "$there"
up() {
  ip -n "$1" addr add "$2/24" dev eth0
  ip -n "$1" link set lo up
  ip -n "$1" link set eth0 up
}
up "$here" "$subnet.1"
up "$there" "$subnet.2"
on="ip netns exec" # no function: what is started must be the process that is killed

# ---------------------------------------------------------------------------------------------------
export AGENTLOOP_FLEET__PASSWORD=open-sesame
url=redis://$subnet.1:6379/0

$on "$here" redis-server --bind "$subnet.1" --port 6379 --requirepass open-sesame --save '' \
  --dir "$folder" >"$folder/redis.log" 2>&1 &
pids+=($!)
$on "$there" "$python" -m agentloop rollouts --redis "$url" --run two \
  sandbox.backend=process >"$folder/runtime.log" 2>&1 &
runtime=$!
pids+=("$runtime")
$on "$here" "$python" -m agentloop train docs/recipes/small.toml fleet.redis="$url" \
  run.folder="$folder" run.name=two "$@"
wait "$runtime" # it goes home when the run is over
# ---------------------------------------------------------------------------------------------------
