#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=01:00:00
#SBATCH --no-kill
#SBATCH --requeue --open-mode=append
#SBATCH --signal=B:USR1@120
# Slurm keeps the other hosts when it has lost one, and signals two minutes before the end: then the job is queued again.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
exec ringreduce run --requeue --elastic --grace 20 --max-restarts 3 python train.py
