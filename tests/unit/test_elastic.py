"""Elastic training without a framework: what a state keeps, and when the loop begins again."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.common.errors import CollectiveError, MismatchError, PeerLostError
from ringreduce.elastic import HostsUpdatedInterrupt, NumpyState, ObjectState, State, run, run_fn
from ringreduce.elastic.commits import choose
from ringreduce.launcher.marks import Mark, RankMessages


class Recorded(State):
    """Writes down what is asked of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[str] = []

    def save(self) -> None:
        self.log.append("save")

    def restore(self) -> None:
        self.log.append("restore")

    def sync(self) -> None:
        self.log.append("sync")

    def reset(self) -> None:
        self.log.append("reset")


class Disk:
    """Where another job would find commits."""

    def put_last(self, number: int) -> None:
        """It was not skipped."""

    def settle(self) -> None:
        """All is written."""


class Kept(Recorded):
    """A state that another job would find."""

    _disk: Any = Disk()


def test_a_state_goes_back_to_what_was_committed() -> None:
    """Values are copied when they are committed, and again when they are restored, however deep a change is."""
    state = ObjectState(epoch=1, history=[[1]])
    state.epoch = 2
    state.history[0].append(2)
    state.commit()
    state.epoch = 3
    state.history[0].append(3)
    for _ in range(2):
        state.restore()
        assert (state.epoch, state.history) == (2, [[1, 2]])
        state.history[0].append(4)


def test_values_of_numpy_programs_are_kept(world: None) -> None:
    """Arrays that are changed in place, and what is None at first."""
    state = NumpyState(weights=np.zeros(3), best=None)
    state.weights += 1
    state.best = 4.0
    state.commit()
    state.weights += 1
    state.best = None
    state.restore()
    assert (state.weights.tolist(), state.best) == ([1, 1, 1], 4.0)


def test_what_was_never_committed_goes_back_to_the_start() -> None:
    """The first values are a copy too."""
    state = ObjectState(values=[1])
    state.values.append(2)
    state.restore()
    assert state.values == [1]


def test_sync_takes_the_values_of_rank_0() -> None:
    """What the broadcast returns becomes the values, and what is gone back to."""
    state = ObjectState(lambda values: {name: value + 10 for name, value in values.items()}, epoch=1)
    state.sync()
    assert state.epoch == 11
    state.epoch = 12
    state.restore()
    assert state.epoch == 11


@pytest.mark.parametrize(
    ("changes", "skip_sync"), [([1], True), ([1, 1], True), ([2], False), ([3], False), ([1, 2], False)]
)
def test_changes_of_hosts_interrupt_once(changes: list[int], skip_sync: bool) -> None:
    """Removals alone leave nothing to synchronise; once they were told, changes are over."""
    state = ObjectState(epoch=0)
    state.check_host_updates()
    for time, change in enumerate(changes):
        state.on_hosts_updated(time, change)
    state.epoch = 5
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skip_sync
    state.commit()
    state.epoch = 6
    state.restore()
    assert state.epoch == 5


def test_rank_0_decides_whether_hosts_have_changed() -> None:
    """What another rank has heard does not count there; what rank 0 has heard counts everywhere."""
    state = Recorded(bcast_object=lambda changes: 0)
    state.on_hosts_updated(0.0, 2)
    state.check_host_updates()
    state = Recorded(bcast_object=lambda changes: 1)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


def test_a_state_that_does_not_outlive_the_job_goes_on(
    world: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where other hosts take another job, it says once what that takes."""
    monkeypatch.setenv("RINGREDUCE_RESTARTABLE", "1")
    state = ObjectState(epoch=0)
    for _ in range(2):
        state.on_hosts_updated(0.0, 2)
        state.commit()
    assert caplog.text.count("call state.keep_on_disk(folder) before the training") == 1


@pytest.mark.parametrize(("recoveries", "begins"), [(0, True), (1, False), (2, False)])
def test_ranks_do_not_begin_again_past_the_limit(
    recoveries: int, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death may have used up what was left when the launcher asked."""
    monkeypatch.setenv("RINGREDUCE_RESET_LIMIT", "1")
    monkeypatch.setattr("ringreduce.runtime.recoveries", lambda: recoveries)
    rr.init()
    try:
        monkeypatch.setenv("RINGREDUCE_RESTARTABLE", "1")
        state = Kept()
        state.on_hosts_updated(0.0, 2)
        with pytest.raises(HostsUpdatedInterrupt) if begins else nullcontext():
            state.commit()
    finally:
        rr.shutdown()


def test_what_the_launcher_has_asked_before_a_recovery_does_not_count(
    world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was for the ranks that there were; if it holds still, the launcher asks again."""
    kept = [True]
    monkeypatch.setattr("ringreduce.runtime.hosts_changed", lambda: bool(kept) and kept.pop())
    state = Recorded()
    state.on_reset()
    state.check_host_updates()
    assert kept == []


def test_a_training_that_cannot_end_the_program_goes_on(
    world: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On another thread, where only that would end, and the program go on as if the training were done."""
    monkeypatch.setenv("RINGREDUCE_RESTARTABLE", "1")
    monkeypatch.setenv("RINGREDUCE_SHELL", str(os.getppid()))
    state = Kept()

    def train() -> None:
        for _ in range(2):
            state.on_hosts_updated(0.0, 2)
            state.commit()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(train).result()
    assert caplog.text.count("call it on the main thread") == 1
    state.on_hosts_updated(0.0, 2)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()


def test_a_state_that_cannot_be_kept_after_all_goes_on(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a disk that is full, for instance: the function is called again, and no rank ends."""
    monkeypatch.setenv("RINGREDUCE_RESTARTABLE", "1")

    class Full(Kept):
        def _keep_for_next_job(self) -> bool:
            self.log.append("full")
            return False

    @run
    def train(state: Full) -> str:
        if "full" not in state.log:
            state.on_hosts_updated(0.0, 2)
            state.commit()
        return "done"

    state = Full()
    assert train(state) == "done"
    assert state.log == ["sync", "save", "full"]


def test_ranks_end_well_once_another_job_can_begin(
    world: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With status 0 and a message to the launcher."""
    messages = RankMessages(tmp_path)
    monkeypatch.setenv("RINGREDUCE_RESTARTABLE", "1")
    monkeypatch.setenv("RINGREDUCE_MESSAGES", str(tmp_path))
    monkeypatch.setenv("RINGREDUCE_SHELL", str(os.getppid()))

    class Written(Kept):
        def _keep_for_next_job(self) -> bool:
            return True

    @run
    def train(state: Written) -> None:
        state.on_hosts_updated(0.0, 2)
        state.commit()

    with pytest.raises(SystemExit) as ends:
        train(Written())
    assert not ends.value.code
    assert not rr.is_initialized()
    assert messages.read() == [Mark("begins again", 0, os.uname().nodename)]
    messages.close()


def test_srun_is_told_from_what_lets_ranks_go_on(
    world: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the command to use; under mpirun in an allocation of Slurm there is none."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    run(lambda state: None)(Recorded())
    assert "srun ends this job when one of its ranks dies" in caplog.text
    assert "ringreduce run --elastic" in caplog.text
    caplog.clear()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    run(lambda state: None)(Recorded())
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("common", "with_parts", "chosen"),
    [
        ({}, [], None),
        ({3: 1, 4: 1}, [], 4),
        ({3: 1, 4: 1}, [3, 4], 4),
        ({3: 1, 4: 1}, [3], 3),  # the part of a rank is missing
        ({3: 1, 4: 2}, [3], 4),  # one of another number of ranks needs none
    ],
)
def test_with_which_commit_a_job_begins(
    world: None, common: dict[int, int], with_parts: list[int], chosen: int | None
) -> None:
    """The last, unless it is of as many ranks as there are now, and lacks what they have of their own."""
    assert choose(list(common), with_parts, common) == chosen


def test_a_run_without_events_is_one_call(world: None) -> None:
    """The state is synchronised first; arguments and result are passed through, and the name stays."""

    @run
    def train(state: Recorded, first: int, *, second: int) -> int:
        state.log.append("train")
        return first + second

    state = Recorded()
    assert train(state, 1, second=2) == 3
    assert state.log == ["sync", "train"]
    assert train.__name__ == "train"


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (HostsUpdatedInterrupt(), ["sync", "train", "reset", "first", "second", "sync", "train"]),
        (HostsUpdatedInterrupt(skip_sync=True), ["sync", "train", "reset", "first", "second", "train"]),
        (PeerLostError(1, "test"), ["sync", "train", "restore", "reset", "first", "second", "sync", "train"]),
        (CollectiveError("test"), ["sync", "train", "restore", "reset", "first", "second", "sync", "train"]),
    ],
    ids=["updated", "removed", "lost", "raised by the program"],
)
def test_a_change_of_ranks_begins_again(world: None, event: Exception, expected: list[str]) -> None:
    """After a new start, with callbacks in their order; from the last commit only if something was lost."""
    state = Recorded()
    state.register_reset_callbacks([lambda: state.log.append("first"), lambda: state.log.append("second")])
    events = [event]
    before = rr.world()

    @run
    def train(state: Recorded) -> str:
        state.log.append("train")
        if events:
            raise events.pop()
        return "done"

    assert train(state) == "done"
    assert state.log == expected
    assert rr.is_initialized()
    assert rr.world() is not before


@pytest.mark.parametrize("error", [MismatchError({0: "a", 1: "b"}), rr.ConfigError("test"), ValueError("test")])
def test_errors_of_the_program_are_no_change_of_ranks(world: None, error: Exception) -> None:
    """They go to the caller, who would else train for ever."""
    state = Recorded()

    @run
    def train(state: Recorded) -> None:
        raise error

    with pytest.raises(type(error)):
        train(state)
    assert state.log == ["sync"]


@pytest.mark.parametrize("commits", [False, True], ids=["in vain", "with progress"])
def test_a_function_that_always_fails_is_not_called_for_ever(commits: bool) -> None:
    """Four failures without a commit in between are enough; as long as something is committed it goes on."""
    state, calls = Recorded(), []

    def train(state: Recorded) -> str:
        calls.append(len(state.log))
        if len(calls) == 6:
            return "done"
        if commits:
            state.commit()
        raise CollectiveError("again")

    elastic = run_fn(train, lambda: state.log.append("meet"))
    if commits:
        assert elastic(state) == "done"
        return
    with pytest.raises(CollectiveError, match="again"):
        elastic(state)
    assert len(calls) == 4
    assert state.log == ["sync", "restore", "meet", "reset"] * 3 + ["sync"]


def test_ranks_that_cannot_meet_anew_end_the_loop() -> None:
    """What the new start raises goes to the caller, of whatever kind it is; nothing is tried again."""
    state = Recorded()

    def train(state: Recorded) -> None:
        raise PeerLostError(1, "test")

    def fail() -> None:
        raise PeerLostError(1, "still")

    with pytest.raises(PeerLostError, match="still"):
        run_fn(train, fail)(state)
    assert state.log == ["sync", "restore"]


@pytest.mark.parametrize("name", ["_hidden", "commit", "sync", "on_reset"])
def test_a_state_refuses_names_that_it_needs(name: str) -> None:
    """A value under such a name would not be kept, or would take a method's place."""
    with pytest.raises(rr.ConfigError, match=f"cannot have a value of the name {name}"):
        ObjectState(**{name: 1})
