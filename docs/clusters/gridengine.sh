#!/bin/bash
#$ -N train
#$ -cwd
#$ -pe mpi 8
#$ -l h_rt=01:00:00
export OMP_NUM_THREADS=1
ringreduce run python train.py
