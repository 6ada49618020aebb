#!/bin/bash
# The ranks of one host in one container: so they share memory.
apptainer exec train.sif ringreduce run -np 4 python train.py
