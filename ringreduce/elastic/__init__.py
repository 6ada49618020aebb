"""Training that outlives a change of its ranks: what is kept, when, and how it goes on. Knows no framework."""

from ringreduce.elastic.loop import run, run_fn
from ringreduce.elastic.state import HostsUpdatedInterrupt, ObjectState, State
from ringreduce.elastic.store import CommitStore

__all__ = ["CommitStore", "HostsUpdatedInterrupt", "ObjectState", "State", "run", "run_fn"]
