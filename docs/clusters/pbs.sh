#!/bin/bash
#PBS -N train
#PBS -l select=2:ncpus=8:mpiprocs=4
#PBS -l walltime=01:00:00
cd "$PBS_O_WORKDIR" || exit
export OMP_NUM_THREADS=2
ringreduce run python train.py
