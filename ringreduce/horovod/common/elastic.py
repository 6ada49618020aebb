"""Elastic training, under the name of Horovod's module for all frameworks."""

from ringreduce.elastic import ObjectState, State

__all__ = ["ObjectState", "State"]
