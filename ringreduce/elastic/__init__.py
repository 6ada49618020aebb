"""Elastic training, in any framework: states, their commits, and the loop that restores them when the ranks change."""

from ringreduce.elastic.commit_store import CommitStore
from ringreduce.elastic.state import HostsUpdatedInterrupt, ObjectState, State, run, run_fn

__all__ = ["CommitStore", "HostsUpdatedInterrupt", "ObjectState", "State", "run", "run_fn"]
