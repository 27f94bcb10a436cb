#!/usr/bin/env bash
# A SLURM cluster of 2 virtual nodes on this machine, for tests: no systemd, no cgroups.
#   slurm_cluster.sh start FOLDER PORT   8 ports from PORT on; prints nothing, is up when it returns
#   slurm_cluster.sh stop FOLDER                      ends what `start` has started, and only that
# FOLDER must be short (socket paths).
set -euo pipefail
action=$1 folder=$2
export SLURM_CONF=$folder/slurm.conf
PATH=$PATH:/usr/sbin

wait_for() { # WHAT COMMAND...: up to 120 s
  local end=$((SECONDS + 120)) what=$1
  shift
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < end)) || { echo "slurm_cluster: waited 120 s for $what" >&2; tail -n 5 "$folder"/log/* >&2; exit 1; }
    sleep 0.1
  done
}
both_idle() { [[ $(timeout 3 sinfo --noheader --Node --partition debug --format %T | grep -cx idle) == 2 ]]; }

if [[ $action == stop ]]; then
  timeout 5 scancel --user "$(id -un)" 2>/dev/null || true
  for _ in $(seq 50); do [[ -n $(timeout 2 squeue --noheader 2>/dev/null) ]] || break; sleep 0.2; done
  for file in "$folder"/{slurmd.n0,slurmd.n1,slurmctld,munged}.pid; do
    [[ -s $file ]] || continue
    kill -9 "$(<"$file")" 2>/dev/null || true # nothing of it is kept
  done
  exit 0
fi

port=$3
host=$(hostname -s) user=$(id -un)
memory=$(awk '/MemTotal/ {print int($2 / 1024) - 1024}' /proc/meminfo)
mkdir -p "$folder"/{state,log,spool/n0,spool/n1,munge}
chmod 755 "$folder"
chmod 711 "$folder/munge"
dd if=/dev/urandom of="$folder/munge/key" bs=1024 count=1 status=none
chmod 400 "$folder/munge/key"
socket=$folder/munge/socket
munged --force --key-file="$folder/munge/key" --socket="$socket" --pid-file="$folder/munged.pid" \
  --log-file="$folder/log/munged" --seed-file="$folder/munge/seed"

# FirstJobId: the ranks' port follows from it, and clusters of several test sessions share addresses.
# cred_expire: a requeued job would wait for 120 s otherwise. Virtual nodes share a host name: only the address differs.
cat >"$SLURM_CONF" <<CONF
ClusterName=test
FirstJobId=$((port * 13))
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$socket,cred_expire=5
CredType=cred/munge
SlurmctldPort=$port
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/log/slurmctld
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmdLogFile=$folder/log/slurmd.%n
SlurmdSpoolDir=$folder/spool/%n
StateSaveLocation=$folder/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
JobRequeue=1
KillWait=10
SlurmdTimeout=15
SlurmctldTimeout=15
NodeName=n0 NodeHostname=$host NodeAddr=127.0.0.2 Port=$((port + 1)) CPUs=4 RealMemory=$memory
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.3 Port=$((port + 2)) CPUs=4 RealMemory=$memory
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
slurmctld -i
slurmd -N n0
slurmd -N n1
wait_for "two idle nodes" both_idle
