"""Data-parallel training whatever the framework; `ringreduce.training.framework` says how one is bound."""
