"""How ranks agree on the key of a world: who has another secret, or none, is named on all ranks, and nobody hangs."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from doubles import Wrapper
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringreduce.common import launch as launching
from ringreduce.common.config import VERSION, Config
from ringreduce.common.errors import ChangedMessageError, ConfigError, RingReduceError, TransportError
from ringreduce.common.keys import Secret, write_secret
from ringreduce.common.launch import Launch
from ringreduce.runtime import sealing
from ringreduce.runtime.bootstrap import check_versions
from ringreduce.runtime.sealing import Handshake
from ringreduce.testing import run_threads
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages, exchange_json


@pytest.fixture
def key_files(tmp_path: Path) -> list[str]:
    """The paths of two files with different keys."""
    paths = [tmp_path / name for name in ("one", "other")]
    for path in paths:
        write_secret(path)
    return [str(path) for path in paths]


def shake(
    paths: list[str | None], wrap: Callable[[int, Messages], Any] = lambda rank, messages: messages, ends: bool = False
) -> list[Any]:
    """Let ranks with these files agree; return for each rank the key, or its error.

    Args:
        paths: of the files, by rank.
        wrap: puts something around a rank's messages.
        ends: whether the end of a rank ends the waits of the others, as those of processes do.
    """
    size = len(paths)
    world = MemoryWorld(size, timeout_s=30.0)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        messages = wrap(rank, world.messages(rank))
        handshake = Handshake(Config(key_file=paths[rank]), rank, size)
        try:
            found[rank] = handshake.conclude(messages, check_versions(messages, handshake.greeting))
        except RingReduceError as error:
            found[rank] = error
            if ends:
                world.meeting.abort()

    run_threads(size, run, on_error=world.meeting.abort)
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_all_ranks_get_one_key_and_it_is_new_each_time(size: int, key_files: list[str]):
    first, second = (shake([key_files[0]] * size) for _ in range(2))
    assert all(isinstance(each, Secret) for each in first)
    one, other = ({key.derive("same") for key in keys if key is not None} for keys in (first, second))
    assert len(one) == len(other) == 1
    assert one != other


def test_without_a_file_nothing_is_agreed():
    assert shake([None] * 3) == [None] * 3


def test_one_rank_reads_its_file_all_the_same(tmp_path: Path, key_files: list[str]):
    assert shake([key_files[0]]) == [None]
    with pytest.raises(ConfigError, match=r"RINGREDUCE_KEY_FILE=.*No such file"):
        Handshake(Config(key_file=str(tmp_path / "none")), 0, 1)


@pytest.mark.parametrize("who", [0, 1, 2])
def test_who_has_no_key_is_named_on_all_ranks(who: int, key_files: list[str], tmp_path: Path):
    """Whether the setting is missing there, or the file."""
    paths: list[str | None] = [key_files[0]] * 3
    paths[who] = None
    errors = shake(paths)
    assert all(isinstance(each, ConfigError) for each in errors)
    assert all(f"RINGREDUCE_KEY_FILE is not set on rank {who} of 3" in str(each) for each in errors)
    paths[who] = str(tmp_path / "none")
    errors = shake(paths)
    assert all(isinstance(each, ConfigError) for each in errors)
    assert all(f"rank {who}: RINGREDUCE_KEY_FILE={paths[who]}: No such file" in str(each) for each in errors)


def test_a_rank_with_a_key_never_goes_on_without_one(key_files: list[str]):
    """Even if what comes back says that no rank has one, this rank neither."""

    def change(number: int, arrived: list[bytes]) -> None:
        if number == 0:
            arrived[:] = [json.dumps([VERSION, "a host", None]).encode()] * 2

    for rank in range(2):
        world = MemoryWorld(2)
        world.meeting = threading.Barrier(1)
        messages = Tap(world.messages(rank), change=change)
        handshake = Handshake(Config(key_file=key_files[0]), rank, 2)
        with pytest.raises(ConfigError, match=f"RINGREDUCE_KEY_FILE is not set on rank {1 - rank} of 2"):
            handshake.conclude(messages, check_versions(messages, handshake.greeting))


@pytest.mark.parametrize("who", [0, 1, 2])
def test_who_has_another_key_is_named_on_all_ranks(who: int, key_files: list[str]):
    """Rank 0 agrees with each other rank: where it has the other key, all others are named. No text has a secret."""
    paths = [key_files[int(rank == who)] for rank in range(3)]
    errors = shake([*paths])
    named = f"rank 0 does not agree with {'ranks 1-2' if who == 0 else f'rank {who}'} on a key"
    assert all(isinstance(each, ConfigError) and named in str(each) for each in errors)
    for each in errors:
        for path in key_files:
            assert Path(path).read_text(encoding="ascii").splitlines()[1] not in str(each)


@pytest.mark.parametrize("other", [Launch(job="b"), Launch(job="a", restarts=1)])
def test_ranks_of_two_jobs_with_one_key_do_not_agree(
    other: Launch, key_files: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Somebody has connected a rank of one to those of the other; a job that begins again is another one, too."""
    names = threading.local()
    monkeypatch.setattr(sealing, "launch", lambda: names.launch)

    def wrap(rank: int, messages: Messages) -> Messages:
        names.launch = other if rank == 2 else Launch(job="a")
        return messages

    errors = shake([key_files[0]] * 3, wrap)
    assert all(isinstance(each, ConfigError) for each in errors)
    assert all("does not agree with rank 2 on a key" in str(each) for each in errors)


def test_a_message_of_another_world_is_refused(key_files: list[str]):
    """The first message of a rank, recorded in one world and sent in another in place of its own: it gets no key."""
    recorded: list[bytes] = []
    shake([key_files[0]] * 2, lambda rank, messages: Tap(messages, recorded.append if rank == 1 else None))
    errors = shake([key_files[0]] * 2, lambda rank, messages: Tap(messages, replay=recorded[0] if rank == 0 else None))
    assert all(isinstance(each, TransportError) for each in errors)
    assert "what rank 0 gives to rank 1 does not open" in str(errors[1])


class Tap(Wrapper):
    """Messages of which somebody keeps, or replaces, what ranks exchange.

    Args:
        inner: the messages.
        keep: called with what this rank gives.
        replay: what comes of rank 1 in the first exchange.
        change: called with the number of the exchange, and what has come; changes that.
    """

    def __init__(
        self,
        inner: Messages,
        keep: Callable[[bytes], None] | None = None,
        replay: bytes | None = None,
        change: Callable[[int, list[bytes]], None] | None = None,
    ) -> None:
        super().__init__(inner)
        self._keep = keep
        self._replay = replay
        self._change = change
        self._number = 0

    def exchange(self, payload: bytes) -> list[bytes]:
        if self._keep is not None:
            self._keep(payload)
        arrived = self._inner.exchange(payload)
        if self._replay is not None:
            arrived[1] = self._replay
            self._replay = None
        if self._change is not None:
            self._change(self._number, arrived)
        self._number += 1
        return arrived


@pytest.mark.parametrize(("size", "victim"), [(size, victim) for size in (2, 3, 4) for victim in range(size)])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_is_done_to_a_handshake_is_an_error(number: int, victim: int, size: int, key_files: list[str]):
    """To any byte of any message of another rank that a rank gets: changed, cut off, another's or nothing."""
    if number == 1 and victim == 0:  # of the second exchange, only what rank 0 gives matters
        return
    sent: list[list[bytes]] = []
    shake([key_files[0]] * size, lambda rank, messages: Tap(messages, change=lambda n, all_: sent.append([*all_])))
    for peer in {0} if number == 1 else {*range(size)} - {victim}:
        length = max(len(each[peer]) for each in sent)
        changes: list[Callable[[bytes], bytes]] = [lambda text: b"", lambda text: text[:-1], lambda text: text + text]
        changes += [partial(flipped, place) for place in range(0, length, 7)]
        for each in changes:

            def change(found: int, arrived: list[bytes], each: Any = each, peer: int = peer) -> None:
                if found == number:
                    arrived[peer] = each(arrived[peer])

            got = shake(
                [key_files[0]] * size,
                lambda rank, messages, change=change: Tap(messages, change=change if rank == victim else None),
                ends=True,
            )
            assert isinstance(got[victim], RingReduceError), (each, got)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just(VERSION),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["message", "refused"]), inner),
    max_leaves=5,
)


@settings(max_examples=150)
@given(value=JSON, number=st.sampled_from([0, 1, 2]), peer=st.sampled_from([0, 1]))
@example(value=[VERSION, "a host", {"refused": []}], number=0, peer=1)
@example(value=[[VERSION], "a host", None], number=0, peer=0)
@example(value=["", {"message": "ff"}], number=1, peer=0)
def test_whatever_comes_in_a_handshake_is_an_error(value: Any, number: int, peer: int):
    """Of any form: a rank that gets it raises one of our errors."""

    def change(found: int, arrived: list[bytes]) -> None:
        if found == number:
            arrived[peer] = json.dumps(value).encode()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key")
        write_secret(path)
        got = shake(
            [str(path)] * 2, lambda rank, messages: Tap(messages, change=change if rank != peer else None), ends=True
        )
    assert (number, peer) == (1, 1) or isinstance(got[1 - peer], RingReduceError), got


def test_what_cannot_be_read_is_an_error_whatever_it_is():
    """Also what takes the reader of JSON too deep."""

    class Other:
        def exchange(self, payload: bytes) -> list[bytes]:
            return [payload, b"[" * 100_000]

    with pytest.raises(ChangedMessageError, match="what rank 1 gives to all cannot be read"):
        exchange_json(Other(), 1)


def flipped(place: int, text: bytes) -> bytes:
    """Return a message with one bit changed; nothing, if it has no such byte."""
    return text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :] if place < len(text) else b""


def test_versions_are_compared_first():
    """And ranks without a key say where they are."""
    world = MemoryWorld(2)
    world.meeting = threading.Barrier(1)
    world.payloads[1] = json.dumps(["0", "there", None]).encode()
    with pytest.raises(RingReduceError, match=f"ringreduce {VERSION} on .*\n.*ringreduce 0 on there"):
        check_versions(world.messages(0), None)


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, ""),
        ({"PMIX_NAMESPACE": "prterun-here-12@1"}, "prterun-here-12"),
        ({"PMIX_NAMESPACE": "prterun-here-12@2"}, "prterun-here-12"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}, ""),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "7.1"),
    ],
)
def test_the_launchers_name_for_the_job(environ: dict[str, str], job: str):
    assert launching.Launch.from_environ(environ).job == job


def test_settings_show_the_path_alone(key_files: list[str]):
    secret = Path(key_files[0]).read_text(encoding="ascii").splitlines()[1]
    assert secret not in repr(replace(Config(), key_file=key_files[0]))
