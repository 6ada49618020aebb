"""Elastic training, under the name of Horovod's module for all frameworks."""

from ringreduce.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
