"""Data-parallel training for any framework; `ringreduce.training.binding.framework` says how to bind one."""
