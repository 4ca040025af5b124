#!/bin/bash
# A sweep as a job array: a task's number is the seed, and each task simulates the whole grid, which has no seed itself.
#
#   sbatch --array=0-9 deploy/slurm/sweep.sh policies.toml
#   atoll dashboard .                     # all of them; or atoll sweep policies.toml --out sweep-3 --show
#SBATCH --job-name=atoll-sweep
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=atoll-sweep-%a.log
#SBATCH --signal=B:TERM@60

# A task that begins again runs no finished cell again.
exec atoll sweep "$1" --out "sweep-$SLURM_ARRAY_TASK_ID" --set seed="$SLURM_ARRAY_TASK_ID" \
    --jobs "${SLURM_CPUS_PER_TASK:-1}" --no-plot
