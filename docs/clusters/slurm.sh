#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=01:00:00
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# Of Slurm's munge, which Open MPI's wheel lacks; without it each rank prints two boxes.
export PMIX_MCA_psec=native
srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" python train.py
