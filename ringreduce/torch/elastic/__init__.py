"""Elastic training of PyTorch models, by Horovod's names."""

from ringreduce.elastic import HostsUpdatedInterrupt, ObjectState, State, run, run_fn
from ringreduce.torch.elastic.generators import Generators, seed
from ringreduce.torch.elastic.sampler import ElasticSampler
from ringreduce.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "Generators",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
    "run_fn",
    "seed",
]
