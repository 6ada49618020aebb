#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$ranks
#SBATCH --cpus-per-task=$cores
#SBATCH --time=$clock
#SBATCH --no-kill
#SBATCH --requeue --open-mode=append
#SBATCH --signal=B:USR1@120
# Slurm keeps the other hosts when it has lost one, and signals two minutes before the end: then the job is queued again.
export OMP_NUM_THREADS=$$SLURM_CPUS_PER_TASK
exec $shell_command
