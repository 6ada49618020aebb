#!/bin/bash
#BSUB -J train
#BSUB -n 8
#BSUB -R "span[ptile=4] affinity[core(2)]"
#BSUB -W 1:00
export OMP_NUM_THREADS=2
ringreduce run python train.py
