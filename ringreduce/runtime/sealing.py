"""How the ranks of a world agree on its key, before anything else, where the settings name a file with a secret."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from ringreduce.common.config import Config
from ringreduce.common.errors import ChangedMessageError, ConfigError, TransportError, name_ranks
from ringreduce.common.keys import KEY_NBYTES, KEY_VARIABLE, Secret, read_secret
from ringreduce.common.launch import launch
from ringreduce.runtime.bootstrap import Connection
from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.noise import Initiator, answer
from ringreduce.transport.sealed import SealedMessages, sealed
from ringreduce.transport.waiting import Waiter


class Handshake:
    """One rank's part in agreeing on the key of a world. Serves once.

    Rank 0 makes the key, and sends it to each other rank under a key that these two alone have; see
    `ringreduce.transport.noise`.

    Args:
        config: the settings in force.
        rank, size: this rank, and how many there are.

    Attributes:
        greeting: what this rank gives to all in their first exchange, a value of JSON; None: it has no secret.

    Raises:
        ConfigError: the secret cannot be read, and there is no other rank.
    """

    def __init__(self, config: Config, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._secret: Secret | None = None
        self._initiator: Initiator | None = None
        self.greeting: dict[str, str] | None = None
        if config.key_file is None:
            return
        try:
            self._secret = read_secret(config.key_file, KEY_VARIABLE)
        except ConfigError as error:
            if size == 1:
                raise
            self.greeting = {"refused": str(error)}  # By this all ranks raise the error.
            return
        if rank:
            self._initiator = Initiator(self._psk(), self._prologue(rank))
        self.greeting = {"message": self._initiator.write().hex() if self._initiator is not None else ""}

    def _psk(self) -> bytes:
        assert self._secret is not None
        return self._secret.derive("messages between hosts")

    def _prologue(self, rank: int) -> bytes:
        """Return what rank 0 and another rank know of each other beforehand, so that others do not fit."""
        launched = launch()
        return json.dumps(["ringreduce messages 1", launched.job, launched.restarts, self._size, rank]).encode()

    def conclude(self, messages: Messages, introductions: Sequence[Any]) -> Secret | None:
        """Return the key of the world; None: no rank has a secret. Collective.

        Args:
            messages: the ranks.
            introductions: of all of them, from `check_versions`.

        Raises:
            ConfigError: on all ranks: some have no secret, or another one, or belong to another job.
            ChangedMessageError: what a rank has sent has changed on its way.
        """
        greetings = [greeting for _, _, greeting in introductions]
        greetings[self._rank] = self.greeting  # The own one counts, whatever has come back of it.
        if self._size == 1 or all(greeting is None for greeting in greetings):
            return None
        self._require_secrets(greetings)
        mine = os.urandom(KEY_NBYTES)
        replies = [self._answer(rank, greetings[rank], mine) for rank in range(self._size)] if self._rank == 0 else None
        answers = exchange_json(messages, replies)[0]
        if not isinstance(answers, list) or len(answers) != self._size:
            raise ChangedMessageError("what rank 0 gives to all cannot be read: it has changed on its way")
        refused = [rank for rank, each in enumerate(answers) if each is None]
        if refused:
            assert self._secret is not None
            raise ConfigError(
                f"rank 0 does not agree with {name_ranks(refused)} on a key: {KEY_VARIABLE} names a file with "
                "another key there, or they belong to another job; the key of this rank is "
                f"{self._secret.fingerprint}"
            )
        try:
            key = Secret(mine if self._initiator is None else self._initiator.read(bytes.fromhex(answers[self._rank])))
        except (TransportError, TypeError, ValueError) as error:
            messages.exchange(b"")  # It opens for nobody, so that all ranks raise an error.
            raise ChangedMessageError(f"what rank 0 gives to rank {self._rank} does not open: {error}") from None
        # They travelled in the open: all must know the same.
        transcript = hashlib.sha256(json.dumps([introductions, answers]).encode()).digest()
        SealedMessages(messages, Secret(key.derive("first messages", transcript))).exchange(b"")
        return key

    def _require_secrets(self, greetings: Sequence[Any]) -> None:
        """Raise a ConfigError, on all ranks, if some have no secret or cannot read theirs."""
        for rank, greeting in enumerate(greetings):
            if isinstance(greeting, dict) and "refused" in greeting:
                raise ConfigError(f"rank {rank}: {greeting['refused']}")
        lacking = [rank for rank, greeting in enumerate(greetings) if greeting is None]
        if lacking:
            raise ConfigError(
                f"{KEY_VARIABLE} is not set on {name_ranks(lacking)} of {self._size}, and is on others: set it on all "
                "ranks, or on none"
            )

    def _answer(self, rank: int, greeting: Any, key: bytes) -> str | None:
        """Return what rank 0 answers a rank: the key, sealed; None: what that has sent does not open."""
        if rank == 0:
            return ""
        try:
            return answer(self._psk(), self._prologue(rank), bytes.fromhex(greeting["message"]), key).hex()
        except (TransportError, KeyError, TypeError, ValueError):
            return None


class SealedConnection:
    """Connects ranks as another `Connection` does, but that messages are sealed.

    Args:
        inner: the other one.
        key: of the world.
    """

    def __init__(self, inner: Connection, key: Secret) -> None:
        self._inner = inner
        self._key = key
        self._made = 0
        self.name = inner.name
        self.who = inner.who
        self.introduce = inner.introduce
        self.abort = inner.abort
        self.reconfigure = inner.reconfigure
        self.forget_doubtful = inner.forget_doubtful

    def seal(self, messages: Messages) -> Messages:
        """Return messages between all ranks, sealed. Collective."""
        self._made += 1
        return sealed(messages, self._key, f"messages {self._made}")

    def messages(self, waiter: Waiter) -> Messages:
        return self.seal(self._inner.messages(waiter))

    def messages_among(self, ranks: Sequence[int], waiters: Sequence[Waiter]) -> list[Messages]:
        messages = self._inner.messages_among(ranks, waiters)
        named = f"group {list(ranks)}, messages"
        return [sealed(inner, self._key, f"{named} {number}") for number, inner in enumerate(messages)]
