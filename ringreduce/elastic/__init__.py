"""Elastic training, in any framework: states, their commits, and the loop that restores them when the ranks change."""

from ringreduce.elastic.commit_store import CommitStore
from ringreduce.elastic.numpy_state import NumpyState
from ringreduce.elastic.state import HostsUpdatedInterrupt, ObjectState, State, run, run_fn
from ringreduce.training.data.generators import Generators
from ringreduce.training.data.resumable import ResumableLoader

__all__ = [
    "CommitStore",
    "Generators",
    "HostsUpdatedInterrupt",
    "NumpyState",
    "ObjectState",
    "ResumableLoader",
    "State",
    "run",
    "run_fn",
]
