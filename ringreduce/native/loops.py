"""The compiled function: it runs the program of a plan, from the rendezvous of a call on one node to its last barrier.

It speaks the protocol of `ringreduce.transport.shared.board`, so ranks that run NumPy's path may take part. Patience,
deaths, limits and errors are Python's: a call that has waited, or worked, for long returns where it is to go on.
"""

from __future__ import annotations

from functools import partial

import numba
from numba import njit, types

from ringreduce.native.intrinsics import (
    call,
    copy,
    fence,
    give_core_away,
    load_acquire,
    pause,
    pointer_to,
    store_release,
)
from ringreduce.native.layout import (
    ADDRESS_BITS,
    ARRAY,
    ARRAY_NBYTES,
    ARRIVE,
    AWAIT,
    BARRIER_LINE,
    BARRIERS,
    BASES,
    CALLS,
    COME_FLAG,
    COPY,
    COUNTERS,
    DIVISOR,
    DONE,
    ENTER,
    EXPECT,
    FIELDS,
    FINISH,
    FROM_SOURCE,
    GROW,
    HEAD,
    HEAD_NBYTES,
    HELD_POLLS,
    ITEMSIZE,
    LATE_BARRIER,
    LATE_ENTRY,
    LINE_NBYTES,
    MAILBOX_NBYTES,
    MINE,
    MISMATCH,
    MOVED,
    NEXT,
    NOTE_POLLS,
    NUMBER,
    PAIR,
    POLLS,
    PUBLISHED,
    PUBLISHES,
    PUT_BASE,
    PUT_END,
    PUT_FLAG,
    PUTTING,
    REDUCE,
    ROOM,
    ROOMS,
    ROUND,
    SCRATCH,
    SCRATCH_NBYTES,
    SHARE_OUT,
    SHARED_OUT,
    SIGNATURE,
    SIZE,
    STREAM,
    TAKE_BASE,
    TAKEN,
    TAKING,
    UNFINISHED,
    WRITTEN,
    YIELDS,
)

_numbers = pointer_to(types.int64)
_bytes = pointer_to(types.uint8)
compiled = partial(njit, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
_WORD = 8
#: After so many bytes a call returns, so that signals are heard: a millisecond at most.
_MOST_NBYTES = 2 << 20


@njit
def words(address):
    """Return numbers of 64 bits in memory."""
    return numba.carray(_numbers(address), 1)


@njit
def next_line(position):
    """Return where in memory the line begins that follows."""
    return (position + LINE_NBYTES - 1) // LINE_NBYTES * LINE_NBYTES


@njit
def place(plan, word):
    """Return the address in an instruction."""
    return plan[BASES + (word >> ADDRESS_BITS)] + (word & (FROM_SOURCE - 1))


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
def publish(plan, counters):
    """Count a call, and let the others see it."""
    number = counters[CALLS] + 1
    counters[CALLS] = number
    mine = plan[MINE] + (number & 1) * LINE_NBYTES
    line = words(mine)
    # Others poll this line: each store makes it travel.
    for i in range(plan[PUBLISHES]):
        if line[SIGNATURE + i] != plan[PUBLISHED + i]:
            line[SIGNATURE + i] = plan[PUBLISHED + i]
            counters[WRITTEN + (number & 1)] = 1
    store_release(mine + NUMBER * _WORD, number)


@njit
def alike(plan, line):
    """Return whether all other members, which have entered, call the same."""
    for peer in range(plan[SIZE] - 1):  # noqa: SIM110  Numba has no `all`
        if words(plan[FIELDS + peer] + line)[SIGNATURE] != plan[PUBLISHED]:
            return False
    return True


@njit
def reduce(plan, at):
    """Reduce numbers in the order of terms.

    Sums of three or more terms grow in scratch, so that a term that is still to come is not overwritten.
    """
    count = plan[at + 1]
    size = plan[at + 2]
    divisor = plan[DIVISOR]
    target = place(plan, plan[at + 3])
    terms = at + 4
    scratch = plan[SCRATCH]
    itemsize = plan[ITEMSIZE]
    wide = plan[GROW] != 0
    limit = max(count, 1) if size == 2 else SCRATCH_NBYTES // (8 if wide else itemsize)
    for start in range(0, count, limit):
        n = min(limit, count - start)
        skip = start * itemsize
        result = target + skip
        if size == 2:
            call(plan[PAIR], result, place(plan, plan[terms]) + skip, place(plan, plan[terms + 1]) + skip, n, divisor)
        elif wide:
            for term in range(size):
                call(plan[GROW], scratch, term, place(plan, plan[terms + term]) + skip, n, divisor)
            call(plan[ROUND], result, scratch, 0, n, divisor)
        else:
            call(plan[PAIR], scratch, place(plan, plan[terms]) + skip, place(plan, plan[terms + 1]) + skip, n, divisor)
            for term in range(2, size - 1):
                call(plan[PAIR], scratch, scratch, place(plan, plan[terms + term]) + skip, n, divisor)
            call(plan[PAIR], result, scratch, place(plan, plan[terms + size - 1]) + skip, n, divisor)
        if plan[FINISH] != 0:
            call(plan[FINISH], result, 0, 0, n, divisor)


@njit
def is_expected(plan, at):
    """Return whether numbers in memory are what an instruction expects."""
    fence()
    found = words(place(plan, plan[at + 2]))
    for i in range(plan[at + 3]):  # noqa: SIM110
        if found[i] != plan[at + 4 + i]:
            return False
    return True


@compiled(types.int64(*[types.int64] * 5))
def run(address, source, target, phase, patient):
    """Begin a call with ``phase`` `DONE`, or go on with what it has returned; see `ringreduce.native.layout`."""
    plan = words(address)
    counters = words(plan[COUNTERS])
    if phase == DONE:
        number = counters[CALLS] + 1
        plan[BASES + 1] = source
        plan[BASES + 2] = target
        plan[BASES + 3] = (number & 1) * MAILBOX_NBYTES + ((number >> 1) & (plan[ROOMS] - 1)) * plan[ROOM]
        plan[BASES + 4] = (number & 1) * LINE_NBYTES
        plan[NEXT] = FIELDS + plan[SIZE] - 1
    at = plan[NEXT]
    nbytes = 0
    code = DONE
    while nbytes < _MOST_NBYTES:
        kind = plan[at]
        if kind == COPY:
            copy(place(plan, plan[at + 1]), place(plan, plan[at + 2]), plan[at + 3])
            nbytes += plan[at + 3]
            at += 4
        elif kind == REDUCE:
            reduce(plan, at)
            nbytes += plan[at + 1] * plan[ITEMSIZE]
            at += 4 + plan[at + 2]
        elif kind == ENTER:
            if phase != LATE_ENTRY:
                publish(plan, counters)
            line = (counters[CALLS] & 1) * LINE_NBYTES
            if not all_there(plan, line, counters[CALLS], patient):
                code = LATE_ENTRY
                break
            if not alike(plan, line):
                return MISMATCH
            at += 1
        elif kind == EXPECT:
            if not is_expected(plan, at):
                code = plan[at + 1]
                at += 4 + plan[at + 3]
                break
            at += 4 + plan[at + 3]
        elif kind == ARRIVE:
            counters[BARRIERS] += 1
            store_release(plan[MINE] + BARRIER_LINE * LINE_NBYTES, counters[BARRIERS])
            at += 1
        elif kind == SHARE_OUT:
            code = SHARED_OUT
            at += 1
            break
        elif kind == AWAIT:
            if not all_there(plan, BARRIER_LINE * LINE_NBYTES, counters[BARRIERS], patient):
                code = LATE_BARRIER
                break
            at += 1
        else:
            break
        phase = DONE
    else:
        code = UNFINISHED
    plan[NEXT] = at
    return code


@njit
def same_bytes(first, second, count):
    """Return whether memory holds the same bytes."""
    whole = count // _WORD
    words_of_first = words(first)
    words_of_second = words(second)
    for i in range(whole):
        if words_of_first[i] != words_of_second[i]:
            return False
    bytes_of_first = numba.carray(_bytes(first), 1)
    bytes_of_second = numba.carray(_bytes(second), 1)
    for i in range(whole * _WORD, count):  # noqa: SIM110
        if bytes_of_first[i] != bytes_of_second[i]:
            return False
    return True


@compiled(types.int64(types.int64))
def is_same(address):
    """Return whether memory has not changed: how many places, and of each its address, how many numbers, and these."""
    known = words(address)
    at = 1
    for _ in range(known[0]):
        found = words(known[at])
        count = known[at + 1]
        for i in range(count):
            if found[i] != known[at + 2 + i]:
                return 0
        at += 2 + count
    return 1


@compiled(types.int64(types.int64))
def put(address):
    """Put a note, of a head and an array, into a stream; see `ringreduce.native.layout`."""
    message = words(address)
    head_nbytes = message[HEAD_NBYTES]
    head = address + HEAD * _WORD
    if not is_same(head + (head_nbytes + _WORD - 1) // _WORD * _WORD):
        return MOVED
    stream = words(message[STREAM])
    nbytes = message[ARRAY_NBYTES]
    start = words(stream[PUT_FLAG])[0]
    end = start + _WORD + head_nbytes + nbytes
    if stream[PUTTING] or end > stream[PUT_END]:
        return UNFINISHED
    note = stream[PUT_BASE] + start
    words(note)[0] = head_nbytes + nbytes
    copy(note + _WORD, head, head_nbytes)
    copy(note + _WORD + head_nbytes, message[ARRAY], nbytes)
    store_release(stream[PUT_FLAG], next_line(end))
    return DONE


@compiled(types.int64(types.int64))
def take(address):
    """Take a note, of the head that is expected and an array, out of a stream, if one comes within moments."""
    message = words(address)
    head_nbytes = message[HEAD_NBYTES]
    head = address + HEAD * _WORD
    if not is_same(head + (head_nbytes + _WORD - 1) // _WORD * _WORD):
        return MOVED
    stream = words(message[STREAM])
    start = stream[TAKEN]
    polls = stream[NOTE_POLLS]
    while load_acquire(stream[COME_FLAG]) == start:
        if polls <= 0:
            return UNFINISHED
        polls -= 1
        pause()
    nbytes = message[ARRAY_NBYTES]
    note = stream[TAKE_BASE] + start
    if stream[TAKING] or stream[TAKE_BASE] == 0:
        return UNFINISHED
    if words(note)[0] != head_nbytes + nbytes or not same_bytes(note + _WORD, head, head_nbytes):
        return UNFINISHED
    copy(message[ARRAY], note + _WORD + head_nbytes, nbytes)
    stream[TAKEN] = next_line(start + _WORD + head_nbytes + nbytes)
    return DONE
