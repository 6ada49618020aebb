"""Data-parallel training for any framework; `ringreduce.training.framework` says how to bind one."""
