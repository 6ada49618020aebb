"""`DiLoCo` and `LocalSGD`: any torch optimizer, whose replicas step by themselves and exchange weights now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import numpy.typing as npt
import torch

from ringreduce.common.arguments import CheckingArguments
from ringreduce.common.errors import ConfigError
from ringreduce.runtime import global_process_set, init
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.torch import own_state, wrapper, wrapping
from ringreduce.torch.compression import Compression, Compressor, each_array
from ringreduce.torch.local_state import StateAverage, reals
from ringreduce.torch.optimizer import DistributedOptimizer
from ringreduce.torch.own_methods import LOCAL_ADVICE
from ringreduce.torch.private import scaler_of
from ringreduce.torch.reduced import warn_of_own_replica
from ringreduce.torch.sharded.shardable import require_not_shared
from ringreduce.torch.tensors.arrays import TENSORS
from ringreduce.training.binding.framework import Named
from ringreduce.training.calls.parameters import require_same_arrays
from ringreduce.training.optimizers.local import Average, LocalTraining
from ringreduce.training.optimizers.quorum import local_training
from ringreduce.training.optimizers.refusals import refusal
from ringreduce.training.options.features import LOCAL, SCALER
from ringreduce.training.options.local_options import LOCAL_OPTIONS, LocalArguments, LocalOptions, averaging

if TYPE_CHECKING:
    from ringreduce.training.options.declared import Unpack

_LOCAL = "local"  # a key of state dicts


class TensorLeaves:
    """Tensors as one flat array; see `ringreduce.training.optimizers.local.Leaves`.

    Args:
        find: returns them; equal shapes and dtypes on all ranks.
    """

    def __init__(self, find: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._find = find
        self._tensors: list[torch.Tensor] = []

    def find(self) -> tuple[int, str]:
        self._tensors = list(map(reals, self._find()))
        wide = any(each.dtype is torch.float64 for each in self._tensors)
        return sum(each.numel() for each in self._tensors), "float64" if wide else "float32"

    def read(self, flat: npt.NDArray[Any]) -> None:
        for tensor, place in self._pairs(flat):
            place.copy_(tensor)

    def write(self, flat: npt.NDArray[Any]) -> None:
        for tensor, place in self._pairs(flat):
            tensor.copy_(place)

    def _pairs(self, flat: npt.NDArray[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        places = torch.split(torch.from_numpy(flat), [each.numel() for each in self._tensors])
        return [(tensor, place.view(tensor.shape)) for tensor, place in zip(self._tensors, places, strict=True)]


class Stepping:
    """What makes the steps of a replica: the optimizer, or a `DistributedOptimizer` of the ranks that step together.

    Args:
        optimizer: of this rank.
        named: returns its parameters, with names for errors.
        shard: as for `DiLoCo`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Callable[[], Named], shard: Literal["node"] | None
    ) -> None:
        self._optimizer = optimizer
        self._named = named
        self._shard = shard
        self.distributed: DistributedOptimizer | None = None  # None: this rank steps by itself

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Steps, and has the state."""
        return self.distributed or self._optimizer

    def enter(self, replicas: Sequence[Sequence[int]]) -> None:
        """Reduce gradients over the ranks of each replica from now on. Collective."""
        self.leave()
        together = [ProcessSet(each) for each in replicas if len(each) > 1]
        init(process_sets=together)  # registers those that are not registered yet
        mine = next((each for each in together if each.included()), None)
        if mine is not None:
            self.distributed = DistributedOptimizer(self._optimizer, self._named(), process_set=mine, shard=self._shard)
            self.distributed.unwatch()  # DiLoCo watches the steps

    def leave(self) -> None:
        """Reduce no gradients any more: backward passes that come now belong to other steps. Local."""
        if self.distributed is not None:  # its hooks would go on to reduce gradients
            self.distributed.retire()
        self.distributed = None

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only add up gradients."""
        return nullcontext() if self.distributed is None else self.distributed.no_sync()

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which the program may write to parameters. Collective over the replica."""
        return nullcontext() if self.distributed is None else self.distributed.writing()


@LOCAL_OPTIONS.taken()
class DiLoCo(wrapper.Wrapper):
    """Wraps a torch optimizer: replicas step by themselves, and exchange weights once per period.

    A replica is a node, whose ranks reduce their gradients in each step as with `DistributedOptimizer`; or one rank; or
    the ranks of a process set. In every ``period``-th step all ranks average how far their weights have moved, and make
    an outer step with Nesterov's momentum. A replica counts by the number of its ranks.
    `ringreduce.training.optimizers.local` has the formulas and their sources.

    It is a `torch.optim.Optimizer`, as `DistributedOptimizer` is, and shares parameter groups, state, defaults and
    hooks with the wrapped one. Construction and the first step are collective: all ranks begin with the same weights,
    so call `broadcast_parameters` first. Steps are collective over a replica, and over all ranks where an exchange
    begins or ends. All ranks make equally many steps; a replica that is slower than the others may be late for an
    exchange by at most ``RINGREDUCE_TIMEOUT``. With ``quorum`` an outer step does not wait for all;
    `ringreduce.training.optimizers.quorum` says what is otherwise then.

    Between exchanges each replica has weights of its own. Call `synchronize`, on all ranks, before an evaluation and at
    the end. Everywhere else `state_dict` is enough: it needs no other rank, and a run that is stopped in the middle of
    a period goes on from it with the same bits. It is each rank's own, as the weights are: save both on every rank.

    After a death the ranks that go on average what each has learnt, also in the period that was not complete.

    On each rank this takes 12 bytes for each parameter element (16 during a delay) in float32; 8 without momentum; and
    4 for averages of weights (``outer_lr=1, outer_momentum=0``) without compression. Parameters of 16 bits are
    exchanged in float32. Parameters on a GPU are exchanged through the host.

    Args:
        optimizer: the one to wrap, new or used; its parameters must have equal names, shapes and dtypes on all ranks,
            in equal order. All of them are exchanged, whether or not they have gradients; none can be added later.
        named_parameters: the model, or ``model.named_parameters()``: what errors call the parameters. If given, it must
            name them all.
        **options: as for `LocalArguments`.
        warmup_steps: how many first steps reduce the gradients over all ranks, without exchanges.
        compression: the wire format of differences between nodes, one of `Compression` but powersgd and topk. Its
            rounding errors are added to the next exchange, but those of fp16 and bf16.
        average: what to average: ``"parameters"``, by outer steps; ``"buffers"``, those of floating point if
            ``named_parameters`` is the model; and on request ``"state"``, the optimizer's state of each element, by
            parameter and name, over the ranks that have it. The last two are averaged without outer steps. A rank that
            lacks state which others have gets the average, and what is no average (the number of steps) from the first
            rank that has it.
        shard: ``"node"``: a node has parameters and state once, as for `DistributedOptimizer`; with ``replica="node"``,
            no warm-up steps, and no state among the averages.

    All arguments but the first two must agree on all ranks.

    Raises:
        ConfigError: an argument is wrong; names are missing or used twice. The other ranks get a `MismatchError`.
        MismatchError: the ranks have different parameters or arguments.
        UnsupportedBufferError: parameters are sharded, or have no shape yet.
    """

    _advice = LOCAL_ADVICE

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: wrapping.NamedParameters = None,
        *,
        warmup_steps: int = 0,
        compression: type[Compressor] = Compression.none,
        average: Sequence[Literal["parameters", "buffers", "state"]] = ("parameters", "buffers"),
        shard: Literal["node"] | None = None,
        **options: Unpack[LocalArguments],
    ) -> None:
        # Optimizer.__init__ is not called, as in DistributedOptimizer.
        self._optimizer = optimizer
        self._warm: bool | None = None  # whether steps are those of the warm-up; None: the next call finds out
        ranks = global_process_set.communicator
        with CheckingArguments(ranks, "DiLoCo", "DiLoCo"):
            if isinstance(optimizer, wrapper.Wrapper):
                raise ConfigError("DiLoCo wraps the optimizer itself, which a DistributedOptimizer has as `wrapped`")
            wrapping.require_optimizer(optimizer, "DiLoCo")
            parameters = wrapping.parameters_of(optimizer)
            require_not_shared(parameters)
            self._options = LocalOptions(
                warmup_steps=warmup_steps,
                compression=None if compression is Compression.none else compression,
                average=average,
                shard=shard,
                ranks=ranks.size,
                **options,
            )
            places = self._options.cut([each.numel() for each in parameters])
            self._named = partial(wrapping.named_parameters, optimizer, wrapping.names_of(parameters, named_parameters))
        named = self._named()
        self.needs_whole_commits = shard is not None
        self.needs_own_commits = True
        words = self._options.in_words()
        require_same_arrays(TENSORS, ranks, caller="DiLoCo", named=named, devices=True, options=words)
        self._stepping = Stepping(optimizer, self._named, shard)
        over = f"{len(named)} parameters, {named[0][0]} to {named[-1][0]}" if named else "no parameters"
        self._described = f"DiLoCo over {over}"
        self._local = local_training(
            self._described,
            self._options,
            parameters=[TensorLeaves(partial(list, parameters[place])) for place in places],
            others=self._others(named_parameters),
            writing=self._stepping.writing,
        )
        self._watch_arrivals()
        unused = partial(_unused, self._local, f"the {self._described}")
        self._unwatch = wrapping.watch_steps(optimizer, self._stepped_by_itself, unused=unused)
        self._enter_phase()

    def _others(self, model: wrapping.NamedParameters) -> list[Average]:
        """Return what is averaged besides parameters."""
        others: list[Average] = []
        if isinstance(model, torch.nn.Module) and "buffers" in self._options.average:
            names = [name for name, each in model.named_buffers() if each.is_floating_point()]
            others.append(Average(TensorLeaves(lambda: [model.get_buffer(name) for name in names]), "buffers"))
        if "state" in self._options.average:
            others.append(StateAverage(self._optimizer, self._named))
        return others

    def _enter_phase(self) -> None:
        """Let steps reduce gradients over the ranks that step together from now on. Collective."""
        ranks = global_process_set.communicator
        self._warm = self._local.warming
        everyone = list(range(ranks.size))
        self._replicas = [everyone] if self._warm else self._options.replicas(ranks.topology.nodes)
        self._stepping.enter(self._replicas)

    def _require_phase(self) -> None:
        """Go on in the world there is now, and in the phase of the step that comes. Collective if one is new."""
        self.rejoin()
        if self._warm is not self._local.warming:  # a state was loaded
            self._enter_phase()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and begin or end the exchanges that are due. Collective, see the class.

        Args:
            closure: as for `DistributedOptimizer.step`; its gradients and its loss are reduced over the replica.

        Raises:
            MismatchError: the ranks began with different weights, or have loaded states of different runs or steps; or
                buffers or state that is averaged have different lengths.
            ConfigError: a rank has joined; or a sampler divides samples by speed.
        """
        self._require_phase()
        self._local.before_step()
        wrapping.STEPPING.add(id(self._optimizer))
        try:
            result = self._stepping.optimizer.step() if closure is None else self._stepping.optimizer.step(closure)
        finally:
            wrapping.STEPPING.discard(id(self._optimizer))
        self._local.after_step()
        if self._arrivals is not None:
            self._arrivals.reduced()
        if self._warm is not self._local.warming:
            self._enter_phase()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self._stepping.optimizer.zero_grad(set_to_none)
        if self._arrivals is not None:
            self._arrivals.cleared()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> torch.Tensor:
        """Reduce the gradients over the replica, then clip them. Collective over the replica.

        In warm-up steps the replica is all ranks; so it is in the first call after a state was loaded or a world begun.

        Args:
            max_norm, norm_type, options: as for `DistributedOptimizer.clip_grad_norm_`.
        """
        self._require_phase()
        if self._stepping.distributed is not None:
            return self._stepping.distributed.clip_grad_norm_(max_norm, norm_type, **options)
        return torch.nn.utils.clip_grad_norm_(wrapping.parameters_of(self._optimizer), max_norm, norm_type, **options)

    @property
    def outer_steps(self) -> int:
        """How many outer steps the weights have that this replica goes on from. Local."""
        return self._local.outer_steps

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only add up gradients; see `DistributedOptimizer.no_sync`."""
        return self._stepping.no_sync()

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which the program may write to parameters; see `DistributedOptimizer.writing`."""
        return self._stepping.writing()

    def synchronize(self) -> None:
        """Make the weights of all ranks their average, and with them all else that is averaged. Collective.

        Call it before an evaluation and at the end of training. It ends exchanges that are under way, and does not
        change the outer momentum.
        """
        self.rejoin()
        self._local.synchronize()

    def rejoin(self) -> None:
        """Go on in a new world, after ``shutdown()`` and ``init()``; in the same world, do nothing. Collective.

        The ranks of the new world average their weights. `step` and `synchronize` call it by themselves.

        Raises:
            ConfigError: the process sets of ``replica`` do not have each rank of this world once.
        """
        if self._local.rejoin():
            self._enter_phase()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `ConfigError`: what is exchanged is fixed when the optimizer is made."""
        raise ConfigError(
            "DiLoCo exchanges the parameters that it was made with: give it all of them, those that are frozen too"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and under ``"local"`` the state to resume from in mid-period. Local."""
        local = self._local.state_dict()
        averages = each_array(torch.from_numpy, local["averages"])
        return {**self._stepping.optimizer.state_dict(), _LOCAL: {**local, "averages": averages}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`, on all ranks; with one of the unwrapped optimizer, local
        training begins anew.

        Rounding errors of compression are loaded only by the rank that saved them, among as many ranks.

        Raises:
            ConfigError: the state is of other parameters or other options; nothing is loaded.
        """
        state = dict(state_dict)
        local = state.pop(_LOCAL, None)
        if local is not None:
            averages = each_array(lambda tensor: tensor.cpu().numpy(), local["averages"])
            local = {**local, "averages": averages}
            self._local.require_fit(local)
        own_state.load(self._stepping.optimizer, state)
        self._local.load_state_dict(local)
        if self._warm is not self._local.warming:
            self._warm = None
            self._stepping.leave()  # which needs no other rank; the next step, or clipping, enters the other phase

    def __repr__(self) -> str:
        return f"DiLoCo(every {self._options.period} steps, {len(self._replicas)} replicas of {self._optimizer!r})"

    def _may_own_methods_step(self) -> bool:
        return global_process_set.communicator.size == 1

    def _prepare_for_scaler(self, caller: FrameType) -> None:
        if scaler_of(caller) is not None:
            raise refusal(LOCAL, SCALER)

    def _stepped_by_itself(self) -> None:
        """Warn, once, of a step of the wrapped optimizer that counts in no period."""
        if global_process_set.communicator.size > 1:
            self._unwatch()
            warn_of_own_replica(self._described)


def _unused(local: LocalTraining, described: str) -> str | None:
    """Return what has ended before it has made a step; None: it has made some."""
    return None if local.steps else described


def LocalSGD(  # noqa: N802
    optimizer: torch.optim.Optimizer, named_parameters: wrapping.NamedParameters = None, **options: Any
) -> DiLoCo:
    """Return a `DiLoCo` with other defaults: replicas average their weights once per period. Collective.

    Args:
        optimizer, named_parameters: as for `DiLoCo`.
        options: the others of `DiLoCo`; ``outer_lr`` is 1 and ``outer_momentum`` 0 unless they are given.

    Raises:
        as `DiLoCo`.
    """
    return DiLoCo(optimizer, named_parameters, **averaging(options))
