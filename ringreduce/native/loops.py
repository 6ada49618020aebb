"""Compiled calls on one node: publish, wait so long, compare signatures, add, meet again.

They speak the protocol of `ringreduce.transport.shared.board`, so ranks that run NumPy's path may take part. Patience,
deaths, limits and errors are Python's: a call that has waited for long returns where it is to go on.
"""

from __future__ import annotations

import numba
from numba import njit, types

from ringreduce.native.intrinsics import call, copy, give_core_away, load_acquire, pause, pointer_to, store_release
from ringreduce.native.layout import (
    BARRIER_LINE,
    BARRIERS,
    CALLS,
    CODE,
    COUNT,
    COUNTERS,
    DONE,
    END,
    FIELDS,
    FINISH,
    GROW,
    HELD_POLLS,
    INDEX,
    ITEMSIZE,
    LATE_BARRIER,
    LATE_ENTRY,
    LINE_NBYTES,
    MAILBOX,
    MINE,
    MISMATCH,
    MOVED,
    NUMBER,
    PAIR,
    PLACES,
    POLLS,
    ROOM,
    SCRATCH,
    SCRATCH_NBYTES,
    SIGNATURE,
    SIZE,
    SOURCE,
    TARGET,
    TURNS,
    WRITTEN,
    YIELDS,
)

_numbers = pointer_to(types.int64)
_WORD = 8
#: Bytes that are added and stored to the others while they are in a core's cache.
_PIECE_NBYTES = 32768


@njit
def words(address, count):
    """Return numbers of 64 bits in memory."""
    return numba.carray(_numbers(address), count)


@njit
def all_there(plan, line, number, patient):
    """Wait until the flag of a line is ``number`` or more on all other members; return whether it is."""
    polls = plan[POLLS] if patient else plan[HELD_POLLS]
    yields = plan[YIELDS] if patient else 0
    for peer in range(plan[SIZE] - 1):
        flag = plan[FIELDS + peer] + line
        tries = 0
        while load_acquire(flag) < number:
            if tries >= polls:
                if tries >= polls + yields:
                    return False
                give_core_away()
            else:
                pause()
            tries += 1
    return True


@njit
def begin(plan):
    """Count a call, and publish all of it but its number; return that."""
    counters = words(plan[COUNTERS], 4)
    number = counters[CALLS] + 1
    counters[CALLS] = number
    line = words(plan[MINE] + (number & 1) * LINE_NBYTES, 4)
    # Others poll this line: each store makes it travel.
    if line[SIGNATURE] != plan[CODE] or line[PLACES] != plan[SOURCE] or line[PLACES + 1] != plan[TARGET]:
        line[SIGNATURE] = plan[CODE]
        line[PLACES] = plan[SOURCE]
        line[PLACES + 1] = plan[TARGET]
        counters[WRITTEN + (number & 1)] = 1
    return number


@njit
def alike(plan, line):
    """Return whether all other members, which have entered, call the same."""
    for peer in range(plan[SIZE] - 1):  # noqa: SIM110  Numba has no `all`
        if words(plan[FIELDS + peer] + line, 4)[SIGNATURE] != plan[CODE]:
            return False
    return True


@njit
def reduce(plan, terms, offset, target, count):
    """Reduce numbers of all members, in their order.

    Sums of three or more terms grow in scratch, so that a term that is still to come is not overwritten.

    Args:
        plan: of the call.
        terms: the field from which on it has the addresses of the terms.
        offset: bytes, added to each.
        target: the address of the result.
        count: how many numbers.
    """
    size = plan[SIZE]
    scratch = plan[SCRATCH]
    itemsize = plan[ITEMSIZE]
    wide = plan[GROW] != 0
    limit = max(count, 1) if size == 2 else SCRATCH_NBYTES // (4 if wide else itemsize)
    for start in range(0, count, limit):
        n = min(limit, count - start)
        skip = start * itemsize
        here = offset + skip
        result = target + skip
        if size == 2:
            call(plan[PAIR], result, plan[terms] + here, plan[terms + 1] + here, n, size)
        elif wide:
            for member in range(size):
                call(plan[GROW], scratch, member, plan[terms + member] + here, n, size)
            call(plan[END], result, scratch, 0, n, size)
        else:
            call(plan[PAIR], scratch, plan[terms] + here, plan[terms + 1] + here, n, size)
            for member in range(2, size - 1):
                call(plan[PAIR], scratch, scratch, plan[terms + member] + here, n, size)
            call(plan[PAIR], result, scratch, plan[terms + size - 1] + here, n, size)
        if plan[FINISH] != 0:
            call(plan[FINISH], result, 0, 0, n, size)


@njit(types.int64(*[types.int64] * 5), nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
def mailed(address, source, target, phase, patient):
    """Allreduce private arrays: each rank copies its own into its mailbox, and reduces all.

    There is no barrier: the mailboxes of a call are read until all have entered the next but one. Only a member whose
    arrays are in the arena (`MOVED`) copies its own into its mailbox after the rendezvous; then Python makes a barrier,
    and goes on behind that.
    """
    size = words(address, 1)[SIZE]
    plan = words(address, FIELDS + 3 * size)
    counters = words(plan[COUNTERS], 4)
    number = counters[CALLS]
    me = plan[INDEX]
    boxes = FIELDS + size - 1
    terms = boxes + size
    if phase == DONE:
        number = begin(plan)
    part = (number & 1) * plan[MAILBOX] + (number >> 1) % plan[TURNS] * plan[ROOM]
    line = (number & 1) * LINE_NBYTES
    if phase == DONE:
        copy(plan[boxes + me] + part, source, plan[COUNT] * plan[ITEMSIZE])
        store_release(plan[MINE] + line + NUMBER * _WORD, number)
    if not all_there(plan, line, number, patient):
        return LATE_ENTRY
    if not alike(plan, line):
        return MISMATCH
    if phase != LATE_BARRIER:
        for peer in range(size - 1):
            if words(plan[FIELDS + peer] + line, 4)[PLACES] != plan[SOURCE]:
                return MOVED
    for member in range(size):
        plan[terms + member] = plan[boxes + member] + part
    plan[terms + me] = source
    reduce(plan, terms, 0, target, plan[COUNT])
    return DONE


@njit(types.int64(*[types.int64] * 3), nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
def two_shot(address, phase, patient):
    """Allreduce arrays that all ranks of the node can touch: each reduces a block of all, and stores it in all."""
    size = words(address, 1)[SIZE]
    plan = words(address, FIELDS + 5 * size)
    counters = words(plan[COUNTERS], 4)
    me = plan[INDEX]
    sources = FIELDS + size - 1
    targets = sources + size
    places = targets + size
    if phase == DONE:
        number = begin(plan)
        store_release(plan[MINE] + (number & 1) * LINE_NBYTES + NUMBER * _WORD, number)
    if phase != LATE_BARRIER:
        number = counters[CALLS]
        line = (number & 1) * LINE_NBYTES
        if not all_there(plan, line, number, patient):
            return LATE_ENTRY
        if not alike(plan, line):
            return MISMATCH
        for peer in range(size - 1):
            found = words(plan[FIELDS + peer] + line, 4)
            if found[PLACES] != plan[places + 2 * peer] or found[PLACES + 1] != plan[places + 2 * peer + 1]:
                return MOVED
        nbytes = plan[COUNT] * plan[ITEMSIZE]
        for start in range(0, nbytes, _PIECE_NBYTES):
            piece = min(_PIECE_NBYTES, nbytes - start)
            result = plan[targets + me] + start
            reduce(plan, sources, start, result, piece // plan[ITEMSIZE])
            for member in range(size):
                if member != me:
                    copy(plan[targets + member] + start, result, piece)
        counters[BARRIERS] += 1
        store_release(plan[MINE] + BARRIER_LINE * LINE_NBYTES, counters[BARRIERS])
    if not all_there(plan, BARRIER_LINE * LINE_NBYTES, counters[BARRIERS], patient):
        return LATE_BARRIER
    return DONE
