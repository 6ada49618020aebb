#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$ranks
#SBATCH --cpus-per-task=$cores
#SBATCH --time=$clock
export OMP_NUM_THREADS=$$SLURM_CPUS_PER_TASK
$shell_command
