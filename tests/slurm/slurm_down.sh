#!/usr/bin/env bash
# Cancel the jobs of the private Slurm under DIR and stop its three daemons, by the ids in their pid files.
# Usage: slurm_down.sh DIR
D=${1:?usage: slurm_down.sh DIR}
export SLURM_CONF="$D/slurm.conf"
timeout 10 scancel --user="$(id -un)" --quiet 2>/dev/null
for _ in $(seq 50); do
  [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break
  sleep 0.1
done
pids=()
for file in run/slurmd.pid run/slurmctld.pid munge/munged.pid; do
  [ -s "$D/$file" ] && pids+=("$(cat "$D/$file")")
done
alive() { for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null && return 0; done; return 1; }
kill "${pids[@]}" 2>/dev/null
for _ in $(seq 100); do alive || exit 0; sleep 0.1; done
kill -9 "${pids[@]}" 2>/dev/null
sleep 0.2
! alive
