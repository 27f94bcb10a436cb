# ---- from here on every job is the same -------------------------------------------------------------------------

set -uo pipefail
asked=
trap 'asked=USR1' USR1
trap 'asked=TERM' TERM
logs=$output/logs/slurm-$SLURM_JOB_ID
mkdir -p "$logs"
say() { echo "$(date '+%F %T') $*"; }
joined() { local IFS=,; echo "$*"; }
newest() { # checkpoint
  local last
  for last in "$output"/checkpoints/step-[0-9]*; do :; done
  [[ ! -d $last ]] || echo "${last##*/}"
}
before=$(newest)
restart=${SLURM_RESTART_COUNT:-0}

if [[ -n $env_file ]]; then
  set -a
  # shellcheck source=/dev/null
  source "$env_file"
  set +a
fi
export PYTHONUNBUFFERED=1
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun no longer inherits it
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

# Where the ranks meet: on the first node, at a port that follows from the job and its restart, or the next free one.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=$(scontrol show node "${nodes[0]}" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
MASTER_PORT=$((12000 + (SLURM_JOB_ID * 8 + restart) % 20000))
while (exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done
export MASTER_ADDR MASTER_PORT

# A rank's servers and workers may use the cores of all its node's ranks: hence no binding.
step=(--mpi=none --cpu-bind=none --kill-on-bad-exit=1 --open-mode=append --overlap "${container[@]}")
pattern=${logs//%/%%}

servers=
if ((rollout_nodes > 0)); then
  srun "${step[@]}" --nodes="$rollout_nodes" --ntasks="$rollout_nodes" --ntasks-per-node=1 \
    --nodelist="$(joined "${nodes[@]:train_nodes}")" --output="$pattern/servers-%t.log" "${serve[@]}" &
  servers=$!
fi

say "job $SLURM_JOB_ID, restart $restart, on $SLURM_JOB_NODELIST, ${before:-no checkpoint yet}"
say "the ranks' logs: $logs"
srun "${step[@]}" --nodes="$train_nodes" --ntasks=$((train_nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" \
  --nodelist="$(joined "${nodes[@]:0:train_nodes}")" --output="$pattern/rank-%t.log" "${train[@]}" \
  2>"$logs/srun.log" &
ranks=$!

# SLURM asks this script to stop before the limit; srun passes it on, and the ranks save and exit 75. It is sent again and
# again, since srun drops a signal that comes before the ranks are there.
said=
while kill -0 "$ranks" 2>/dev/null; do
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
if ((code > 128)); then # srun's is the largest: that of a rank that it killed, because another one had ended
  ended=$(sed -n 's/^srun: error: .*: Exited with exit code \([0-9]*\)$/\1/p' "$logs/srun.log" | head -n 1)
  code=${ended:-$code}
fi
[[ -z $servers ]] || { kill "$servers" && wait "$servers"; } 2>/dev/null

((code == 0)) && { say "done"; exit 0; }
if ((code == 75)) || { [[ -n $asked ]] && ((code > 128)); }; then
  # Cancelled or preempted, the job is SLURM's to end or to requeue.
  [[ $(squeue --noheader --job "$SLURM_JOB_ID" --format %T) == RUNNING ]] || exit 75
  idle=0
  [[ $(newest) != "$before" ]] || idle=$(($(cat "$logs/idle" 2>/dev/null || echo 0) + 1))
  echo "$idle" >"$logs/idle"
  if ((idle >= idle_restarts)); then
    say "stopped $idle times in a row without a new checkpoint: not requeued; give it more time, or save more often"
    exit 1
  fi
  if [[ $requeue == yes ]]; then
    say "stopped to be resumed: requeued"
    scontrol requeue "$SLURM_JOB_ID"
  else
    say "stopped to be resumed: submit again to go on"
  fi
  exit 75
fi

# What went wrong: a rank that was killed could tell nobody; otherwise rank 0's last line names the first to fail.
ended=$(sed '/Terminating StepId/,$d' "$logs/srun.log" | sed -n 's/^srun: error: .*: tasks\{0,1\} \([0-9]*\)/\1/p')
first=$(grep -v 'Exited with exit code' <<<"$ended" | sed -n '1s/[^0-9].*//p')
[[ -n $first ]] || first=$(grep -v '^slurmstepd' "$logs/rank-0.log" 2>/dev/null | tail -n 1 | sed -n 's/^rank \([0-9]*\)[,:].*/\1/p')
ended=$(sed -n '1s/[^0-9].*//p' <<<"$ended") # which may have ended rank 0 before that could hear of it
first=${first:-$ended}
say "failed (exit code $code)${first:+; the first to fail was rank $first}"
grep '^srun: error: .*: tasks\{0,1\} ' "$logs/srun.log"
for rank in $(printf '%s\n' 0 "$first" "$ended" | sort -nu); do
  echo "---- the last words of rank $rank ($logs/rank-$rank.log)"
  grep -v '^[[:space:]]*$' "$logs/rank-$rank.log" | tail -n 15
done
exit "$code"
