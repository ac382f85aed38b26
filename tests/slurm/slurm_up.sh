#!/usr/bin/env bash
# Start a private one-node Slurm under DIR: no systemd, nothing in /etc or /run, free ports, two made-up GPUs.
# Usage: slurm_up.sh DIR. Needs root and the Debian packages slurmctld slurmd slurm-client munge.
# Put DIR/bin first on PATH to talk to it. A node that does not come up is a failure with all logs on stderr.
set -euo pipefail
D=${1:?usage: slurm_up.sh DIR}
mkdir -p "$D"/{state,spool,log,run,munge,bin}
HOST=$(hostname -s)
CPUS=${SLURM_TEST_CPUS:-$(nproc --all)}
MEMORY=$(( $(awk '/MemTotal/{print $2}' /proc/meminfo) / 1024 - 1024 ))
read -r CONTROL_PORT NODE_PORT <<<"$(python3 -c '
import socket
sockets = [socket.socket() for _ in range(2)]
for s in sockets: s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))')"

failed() {
  echo "slurm_up.sh: $1" >&2
  tail -n 50 "$D"/log/*.log "$D"/munge/*.log >&2 2>/dev/null || true
  exit 1
}

chmod 700 "$D/munge"
chmod 755 "$D/run"
head -c 1024 /dev/urandom >"$D/munge/munge.key"
chmod 400 "$D/munge/munge.key"
munged --force --key-file="$D/munge/munge.key" --socket="$D/run/munge.sock" --pid-file="$D/munge/munged.pid" \
  --log-file="$D/munge/munged.log" --seed-file="$D/munge/munged.seed" --num-threads=2 || failed "munged did not start"

cat >"$D/slurm.conf" <<CONF
ClusterName=curvature
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$CONTROL_PORT
SlurmdPort=$NODE_PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$D/run/munge.sock,cred_expire=10
CryptoType=crypto/munge
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.log
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,sched_min_interval=10000,defer_batch
GresTypes=gpu
ReturnToService=2
InactiveLimit=0
KillWait=2
BatchStartTimeout=1
MinJobAge=300
SlurmctldTimeout=10
SlurmdTimeout=5
Waittime=0
DefMemPerCPU=1024
RebootProgram=/bin/true
NodeName=$HOST NodeAddr=127.0.0.1 CPUs=$CPUS RealMemory=$MEMORY Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=$HOST Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
CONF
# Any character device will do: Slurm counts it, and sets CUDA_VISIBLE_DEVICES for the job that holds it.
for i in 0 1; do [ -e "$D/run/fakegpu$i" ] || mknod "$D/run/fakegpu$i" c 1 3; done
cat >"$D/gres.conf" <<CONF
AutoDetect=off
NodeName=$HOST Name=gpu File=$D/run/fakegpu[0-1]
CONF
# Inside a job the Snakemake plugin drops SLURM_* variables, SLURM_CONF too; these wrappers put it back.
for command in sbatch srun squeue scancel scontrol sinfo; do
  printf '#!/bin/sh\nSLURM_CONF="%s" exec /usr/bin/%s "$@"\n' "$D/slurm.conf" "$command" >"$D/bin/$command"
  chmod +x "$D/bin/$command"
done
# What restarts the node after a test has killed it.
printf '#!/bin/sh\nSLURM_CONF="%s" exec slurmd -N "%s"\n' "$D/slurm.conf" "$HOST" >"$D/bin/start_node"
chmod +x "$D/bin/start_node"

export SLURM_CONF="$D/slurm.conf"
slurmctld -f "$SLURM_CONF" -c || failed "slurmctld did not start"
slurmd -f "$SLURM_CONF" -N "$HOST" -c || failed "slurmd did not start"
for _ in $(seq 300); do
  [ "$(sinfo -h -o %T 2>/dev/null || true)" = idle ] && break
  sleep 0.1
done
[ "$(sinfo -h -o %T 2>/dev/null || true)" = idle ] || failed "the node did not come up within 30 s"
sinfo -o '%P %n %T %c %m %G'
