"""Messages from one rank to another on pytrees of JAX arrays, inside and outside of `jax.jit`; they are not collective.

A compiled program makes its messages in the order in which they were traced, and drops none; on the CPU its collectives
keep their places in this order. Destination, source and tag are Python ints, fixed when the program is traced. The
arrays of a tree are sent one after the other, in the order of `jax.tree.leaves`; both ranks' trees have equally many.
Messages of the global process set match those of `ringreduce.send` and `ringreduce.recv`.

`jax.checkpoint` refuses messages, which it would make twice. All functions raise, besides what they list: `ConfigError`
for arguments, and the errors of `Communicator.send` and `Communicator.recv`; see `ringreduce.jax.ops` for those of
compiled programs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.jax import ffi
from ringreduce.jax.calls import MESSAGE, CompiledCall, exchange, is_traced, is_tracing, ranks_of
from ringreduce.jax.leaves import is_sparse, usable, usable_leaves
from ringreduce.jax.private import let_messages_into_gradients
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet, require_process_set
from ringreduce.training.binding.error_text import raise_unseen
from ringreduce.transport.array_notes import OWN_TAGS
from ringreduce.transport.point_to_point import PROC_NULL, NoRank

Peer = int | NoRank

let_messages_into_gradients()


def send(tree: Any, dest: Peer, *, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Send arrays to a rank that receives them. No gradient flows through it: see `sendrecv`.

    Args:
        tree: arrays, or numbers, as a pytree.
        dest: another rank of the set, as a rank of the world; `PROC_NULL`: this does nothing.
        tag: as for `ringreduce.send`.
        process_set: whose messages these are.
    """
    _exchange(tree, (), dest, PROC_NULL, tag, process_set, one_way="send")


def recv(like: Any, source: Peer, *, tag: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Return arrays that a rank sends. No gradient flows through it: see `sendrecv`.

    Args:
        like: arrays or `jax.ShapeDtypeStruct`, as a pytree, of the shapes and dtypes that are sent.
        source: another rank of the set, as a rank of the world; `PROC_NULL`: the result is ``like``, with zeros for
            each `jax.ShapeDtypeStruct`.
        tag, process_set: as for `send`.
    """
    return _exchange((), like, PROC_NULL, source, tag, process_set, one_way="recv")


def sendrecv(
    tree: Any, dest: Peer, like: Any, source: Peer, *, tag: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Send arrays to one rank, and return those that a rank sends, at the same time.

    The gradients of what was received go back to their sender, in a message of the same tag. So the sender has to
    differentiate its own result, too; otherwise large gradients wait until the time limit, and small ones are received
    in place of a later message.

    Args:
        tree, dest: as for `send`; this rank, too, if it is also ``source``.
        like, source: as for `recv`.
        tag, process_set: as for `send`.
    """
    return _exchange(tree, like, dest, source, tag, process_set)


def _exchange(
    tree: Any, like: Any, dest: Peer, source: Peer, tag: int, process_set: ProcessSet, one_way: str | None = None
) -> Any:
    raise_unseen()
    require_process_set(process_set)
    sent = usable_leaves(tree, jax.tree.leaves(tree, is_sparse), usable)
    likes, structure = jax.tree.flatten(like, is_sparse)
    rooms = usable_leaves(like, likes, _room)
    mine = process_set.rank()  # Raises where this rank is no member.
    named = (("dest", dest), ("source", source))
    peers = [None if peer is PROC_NULL else process_set.rank_of(whole_number(name, peer)) for name, peer in named]
    if (peers[0] == mine) != (peers[1] == mine):
        raise ConfigError("messages go to other ranks; sendrecv takes this rank as dest and source")
    tag = whole_number("tag", tag, 0)
    if tag >= OWN_TAGS:
        raise ConfigError(f"a tag is less than 2^62, got {tag}")
    if peers == [None, None]:
        return jax.tree.unflatten(structure, rooms)
    call = CompiledCall(MESSAGE, None, ranks_of(process_set), peers=peers, tag=tag)
    if is_traced(sent) or is_traced(rooms) or is_tracing():
        received = _compiled(call, sent, rooms, one_way)
    else:
        jax.effects_barrier()  # Programs that still run make their messages first.
        arrays = [np.array(room) for room in rooms]
        exchange(call, list(map(np.asarray, sent)), arrays)
        received = list(map(jnp.array, arrays))
    return jax.tree.unflatten(structure, received)


def _room(like: Any) -> Any:
    if isinstance(like, jax.ShapeDtypeStruct) and not jax.dtypes.issubdtype(like.dtype, jax.dtypes.extended):
        return jnp.zeros(like.shape, like.dtype)
    return usable(like)


def _compiled(call: CompiledCall, sent: Sequence[Any], rooms: Sequence[Any], one_way: str | None) -> Sequence[Any]:
    sent_like = [(each.shape, each.dtype) for each in sent]
    shapes = [room.shape for room in rooms]
    count = len(sent)
    text = json.dumps(call)
    how: dict[str, Any] = {"batched": "broadcast_all", "in_place": True, "always": True}
    run = jax.custom_vjp(lambda *arrays: ffi.call(text, arrays[count:], shapes, after=arrays[:count], **how))

    def forward(*arrays: Any) -> Any:
        if one_way is not None:
            raise ConfigError(f"no gradient flows through {one_way}; use sendrecv, or jax.lax.stop_gradient")
        made = run(*arrays)
        return made, made

    def backward(made: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        dest, source = call.peers
        given = [_gradient(*each) for each in zip(cotangents, made, strict=True)]
        back = call._replace(peers=(source, dest))
        returned = _compiled(back, given, [jnp.zeros(*like) for like in sent_like], None)
        return *returned, *(given if source is None else map(jnp.zeros_like, given))

    run.defvjp(forward, backward)
    return run(*sent, *rooms)  # type: ignore[no-any-return]


def _gradient(cotangent: Any, made: Any) -> Any:
    """Return the gradient of what was received; zeros for integers, which have none (float0).

    Under `vmap` the gradient has a batch dimension where the received array has one, on all ranks alike: where the loss
    is linear, JAX would give the gradient none.
    """
    if cotangent.dtype == jax.dtypes.float0:
        return jnp.zeros_like(made)
    return jnp.where(jnp.zeros(cotangent.shape, bool), made, cotangent)
