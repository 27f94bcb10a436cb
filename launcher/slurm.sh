# ---- from here on every job is the same -------------------------------------------------------------------------

set -uo pipefail
asked=
trap 'asked=USR1' USR1
trap 'asked=TERM' TERM
logs=$output/logs/slurm-$SLURM_JOB_ID
mkdir -p "$logs"
say() { echo "$(date '+%F %T') $*"; }
try() { # COMMAND...: SLURM's commands fail while its controller is restarted
  local end=$((SECONDS + 60))
  until timeout 20 "$@"; do
    ((SECONDS < end)) || return 1
    sleep 5
  done
}
joined() { local IFS=,; echo "$*"; }
newest() { # checkpoint
  local last
  for last in "$output"/checkpoints/step-[0-9]*; do :; done
  [[ ! -d $last ]] || echo "${last##*/}"
}
ends() { # the job, by its time limit: seconds since 1970; nothing where it has none
  local end
  end=$(try squeue --noheader --job "$SLURM_JOB_ID" --format %e)
  [[ $end != [0-9]*T* ]] || date --date "$end" +%s
}
before=$(newest)
restart=${SLURM_RESTART_COUNT:-0}

export PYTHONUNBUFFERED=1
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun no longer inherits it
[[ -n ${OMP_NUM_THREADS:-} ]] || export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} DYNAMO_MEGATRON_RANK_THREADS=1

# Where the ranks meet: on the first node, at a port that follows from the job and its restart, or the next free one.
mapfile -t nodes < <(try scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=$(try scontrol show node "${nodes[0]:-}" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
if [[ -z $MASTER_ADDR ]]; then
  say "failed: scontrol does not tell the address of the first node of $SLURM_JOB_NODELIST"
  exit 1
fi
MASTER_PORT=$((12000 + (SLURM_JOB_ID * 8 + restart) % 20000))
listened() { timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$MASTER_ADDR" "$MASTER_PORT" 2>/dev/null; }
while listened; do MASTER_PORT=$((MASTER_PORT + 1)); done
export MASTER_ADDR MASTER_PORT

# A rank's servers and workers may use the cores of all its node's ranks: hence no binding.
step=(--mpi=none --cpu-bind=none --open-mode=append --overlap "${options[@]}")
pattern=${logs//%/%%}

servers=
if ((rollout_nodes > 0)); then # a run can do without some of them; rank 0 says what it lacks
  srun "${step[@]}" --kill-on-bad-exit=0 --nodes="$rollout_nodes" --ntasks="$rollout_nodes" --ntasks-per-node=1 \
    ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$((SLURM_CPUS_PER_TASK * ranks_per_node))"} \
    --nodelist="$(joined "${nodes[@]:train_nodes}")" --output="$pattern/servers-%t.log" "${serve[@]}" &
  servers=$!
fi

say "job $SLURM_JOB_ID, restart $restart, on $SLURM_JOB_NODELIST, ${before:-no checkpoint yet}"
say "the ranks' logs: $logs"
srun "${step[@]}" --kill-on-bad-exit=1 --nodes="$train_nodes" --ntasks=$((train_nodes * ranks_per_node)) \
  --ntasks-per-node="$ranks_per_node" --nodelist="$(joined "${nodes[@]:0:train_nodes}")" --output="$pattern/rank-%t.log" "${train[@]}" \
  2>"$logs/srun.log" &
ranks=$!

go_on_later() { # WHY
  local state idle=0
  if ! state=$(try squeue --noheader --job "$SLURM_JOB_ID" --format %T); then
    say "$1; squeue has no answer, so that the job is not requeued: submit again to go on"
    exit 75
  fi
  [[ $state == RUNNING ]] || exit 75 # cancelled or preempted: SLURM's to end or to requeue
  [[ $(newest) != "$before" ]] || idle=$(($(cat "$logs/idle" 2>/dev/null || echo 0) + 1))
  echo "$idle" >"$logs/idle"
  if ((idle >= 3)); then
    say "stopped $idle times in a row without a new checkpoint: not requeued; give it more time, or save more often"
    exit 1
  fi
  if try scontrol requeue "$SLURM_JOB_ID"; then
    say "$1: requeued"
  else
    say "$1; scontrol could not requeue it: submit again to go on"
  fi
  exit 75
}

# SLURM asks this script to stop before the limit; srun passes it on, and the ranks save and exit 75. It is sent again and
# again, since srun drops a signal that comes before the ranks are there. At the limit SLURM would end the job for good:
# ranks that are busy until shortly before it lose what is not saved.
end=$(ends)
said=''
while kill -0 "$ranks" 2>/dev/null; do
  if [[ -n $end ]] && (($(date +%s) >= end - last_call)); then
    end=$(ends) # it may have been given more time
    [[ -z $end ]] || (($(date +%s) < end - last_call)) || go_on_later "busy until the time limit"
  fi
  if [[ -n $asked ]]; then
    [[ -n $said ]] || say "SIG$asked: the ranks save and stop"
    said=yes
    kill -s USR1 "$ranks"
  fi
  sleep 2 &
  wait $! # or until a signal comes
done
wait "$ranks"
code=$?
cat "$logs/srun.log" >&2
if [[ -n $servers ]]; then # they end with the run, or with this script
  for _ in {1..30}; do kill -0 "$servers" 2>/dev/null && sleep 1; done
fi
((code == 0)) && { say "done"; exit 0; }

# The first rank to end decides: how the others end once srun has told them to says nothing.
first=$(sed -n 's/^srun: error: .*: tasks\{0,1\} \([0-9]*\)[^ ]*: \(.*\)/\1 \2/p' "$logs/srun.log" | head -n 1)
how=${first#* } first=${first%% *}
case $how in
  "Exited with exit code 75") go_on_later "stopped to be resumed" ;;
  "Exited with exit code "*) code=${how##* } ;;
  *) # a signal, or nothing where srun itself was ended
    [[ -z $asked ]] || ((code <= 128)) || go_on_later "ended before all was saved"
    state=$(try squeue --noheader --job "$SLURM_JOB_ID" --format %T)
    [[ ${state:-RUNNING} == RUNNING ]] || exit 75 ;;
esac
# Ranks fail within seconds of the loss of a node, SLURM sees it minutes later. No config that is refused (2) comes of it.
if ((code != 2)) && ! timeout --signal=KILL 60 srun --mpi=none --cpu-bind=none --overlap \
  --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 true; then
  go_on_later "failed (exit code $code), and not all nodes answer"
fi

say "failed (exit code $code)"
grep '^srun: error: .*: tasks\{0,1\} ' "$logs/srun.log"
# Rank 0's last line names the first rank to fail. One that was killed has told nobody.
((first)) || first=''
for log in "$logs/rank-0.log" ${first:+"$logs/rank-$first.log"} ${servers:+"$logs"/servers-*.log}; do
  echo "---- $log"
  grep -v '^[[:space:]]*$' "$log" | tail -n 15
done
exit "$code"
