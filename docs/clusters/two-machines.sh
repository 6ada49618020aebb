#!/bin/bash
# Two machines without a scheduler; h1, on which this runs, reaches h2 by ssh.
ringreduce run -H h1:2,h2:2 python train.py
