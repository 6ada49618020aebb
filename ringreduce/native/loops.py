"""The compiled function: it runs the program of a plan, from the rendezvous of a call on one node to its last barrier.

It speaks the protocol of `ringreduce.transport.shared.board`, so ranks that run NumPy's path may take part. Patience,
deaths, limits and errors are Python's: a call that has waited, or worked, for long returns where it is to go on.
"""

from __future__ import annotations

from functools import partial

import numba
from numba import njit, types

from ringreduce.native import layout
from ringreduce.native.intrinsics import (
    call,
    copy,
    end_streams,
    fence,
    give_core_away,
    load_acquire,
    nanoseconds,
    pause,
    pointer_to,
    store_release,
    stream_line,
)

_numbers = pointer_to(types.int64)
_bytes = pointer_to(types.uint8)
compiled = partial(njit, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
_WORD = 8
#: After so many bytes a call returns, so that signals are heard: a millisecond at most.
_MOST_NBYTES = 2 << 20
#: From so many bytes on a copy is timed, which takes 50 ns.
_TIMED_NBYTES = 8 << 10
#: A copy that is slower has taken lines from a core that does not share a cache with this one.
_NEAR_BYTES_PER_NS = 5
#: So many copies then go past the caches, before one is timed again.
_FAR_COPIES = 100


@njit
def words(address):
    """Return numbers of 64 bits in memory."""
    return numba.carray(_numbers(address), 1)


@njit
def next_line(position):
    """Return where in memory the line begins that follows."""
    return (position + layout.LINE_NBYTES - 1) // layout.LINE_NBYTES * layout.LINE_NBYTES


@njit
def place(plan, word):
    """Return the address in an instruction."""
    return plan[layout.BASES + (word >> layout.ADDRESS_BITS)] + (word & (layout.FROM_SOURCE - 1))


@njit
def all_there(plan, line, number, patient):
    """Wait until the flag of a line is ``number`` or more on all other members; return whether it is."""
    polls = plan[layout.POLLS] if patient else plan[layout.HELD_POLLS]
    yields = plan[layout.YIELDS] if patient else 0
    for peer in range(plan[layout.SIZE] - 1):
        flag = plan[layout.FIELDS + peer] + line
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
def copy_past_caches(target, source, nbytes):
    """Copy bytes without taking lines away from another core's cache."""
    head = min(nbytes, -target & (layout.LINE_NBYTES - 1))
    copy(target, source, head)
    lines = (nbytes - head) // layout.LINE_NBYTES
    for line in range(lines):
        stream_line(target + head + line * layout.LINE_NBYTES, source + head + line * layout.LINE_NBYTES)
    done = head + lines * layout.LINE_NBYTES
    copy(target + done, source + done, nbytes - done)
    end_streams()


@njit
def copy_block(plan, word, source, nbytes):
    """Copy bytes to the address in an instruction.

    If that is not in this rank's own result, other cores read there, and still hold the lines that they have read.
    Where cores share a cache, they give lines up soon, and have the new ones soon. Where they do not, that takes
    several times longer than a copy past the caches, which the others get from memory. Which of both is so may change:
    a virtual machine's cores move.
    """
    target = place(plan, word)
    if nbytes < _TIMED_NBYTES or word >> layout.ADDRESS_BITS == layout.FROM_TARGET >> layout.ADDRESS_BITS:
        copy(target, source, nbytes)
    elif plan[layout.FAR] > 0:
        plan[layout.FAR] -= 1
        copy_past_caches(target, source, nbytes)
    else:
        begin = nanoseconds()
        copy(target, source, nbytes)
        if (nanoseconds() - begin) * _NEAR_BYTES_PER_NS > nbytes:
            plan[layout.FAR] = _FAR_COPIES


@njit
def publish(plan, counters):
    """Count a call, and let the others see it."""
    number = counters[layout.CALLS] + 1
    counters[layout.CALLS] = number
    mine = plan[layout.MINE] + (number & 1) * layout.LINE_NBYTES
    line = words(mine)
    # Others poll this line: each store makes it travel.
    for i in range(plan[layout.PUBLISHES]):
        if line[layout.SIGNATURE + i] != plan[layout.PUBLISHED + i]:
            line[layout.SIGNATURE + i] = plan[layout.PUBLISHED + i]
            counters[layout.WRITTEN + (number & 1)] = 1
    store_release(mine + layout.NUMBER * _WORD, number)


@njit
def alike(plan, line):
    """Return whether all other members, which have entered, call the same."""
    for peer in range(plan[layout.SIZE] - 1):
        if words(plan[layout.FIELDS + peer] + line)[layout.SIGNATURE] != plan[layout.PUBLISHED]:
            return False
    return True


@njit
def reduce(plan, at):
    """Reduce numbers in the order of terms.

    Sums of three or more terms grow in scratch, so that a term that is still to come is not overwritten.
    """
    count = plan[at + 1]
    size = plan[at + 2]
    pair = plan[layout.PAIR]
    divisor = plan[layout.DIVISOR]
    target = place(plan, plan[at + 3])
    terms = at + 4
    scratch = plan[layout.SCRATCH]
    itemsize = plan[layout.ITEMSIZE]
    wide = plan[layout.GROW] != 0
    limit = max(count, 1) if size == 2 else layout.SCRATCH_NBYTES // (8 if wide else itemsize)
    for start in range(0, count, limit):
        n = min(limit, count - start)
        skip = start * itemsize
        result = target + skip
        if size == 2:
            call(
                plan[layout.PAIR],
                result,
                place(plan, plan[terms]) + skip,
                place(plan, plan[terms + 1]) + skip,
                n,
                divisor,
            )
        elif wide:
            for term in range(size):
                call(plan[layout.GROW], scratch, term, place(plan, plan[terms + term]) + skip, n, divisor)
            call(plan[layout.ROUND], result, scratch, 0, n, divisor)
        else:
            call(
                plan[layout.PAIR],
                scratch,
                place(plan, plan[terms]) + skip,
                place(plan, plan[terms + 1]) + skip,
                n,
                divisor,
            )
            for term in range(2, size - 1):
                call(pair, scratch, scratch, place(plan, plan[terms + term]) + skip, n, divisor)
            call(pair, result, scratch, place(plan, plan[terms + size - 1]) + skip, n, divisor)
        if plan[layout.FINISH] != 0:
            call(plan[layout.FINISH], result, 0, 0, n, divisor)


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
    counters = words(plan[layout.COUNTERS])
    if phase == layout.DONE:
        number = counters[layout.CALLS] + 1
        plan[layout.BASES + 1] = source
        plan[layout.BASES + 2] = target
        plan[layout.BASES + 3] = (number & 1) * layout.MAILBOX_NBYTES + (
            (number >> 1) & (plan[layout.ROOMS] - 1)
        ) * plan[layout.ROOM]
        plan[layout.BASES + 4] = (number & 1) * layout.LINE_NBYTES
        plan[layout.NEXT] = layout.FIELDS + plan[layout.SIZE] - 1
    at = plan[layout.NEXT]
    nbytes = 0
    code = layout.DONE
    while nbytes < _MOST_NBYTES:
        kind = plan[at]
        if kind == layout.COPY:
            copy_block(plan, plan[at + 1], place(plan, plan[at + 2]), plan[at + 3])
            nbytes += plan[at + 3]
            at += 4
        elif kind == layout.REDUCE:
            reduce(plan, at)
            nbytes += plan[at + 1] * plan[layout.ITEMSIZE]
            at += 4 + plan[at + 2]
        elif kind == layout.ENTER:
            if phase != layout.LATE_ENTRY:
                publish(plan, counters)
            line = (counters[layout.CALLS] & 1) * layout.LINE_NBYTES
            if not all_there(plan, line, counters[layout.CALLS], patient):
                code = layout.LATE_ENTRY
                break
            if not alike(plan, line):
                return layout.MISMATCH
            at += 1
        elif kind == layout.EXPECT:
            if not is_expected(plan, at):
                code = plan[at + 1]
                at += 4 + plan[at + 3]
                break
            at += 4 + plan[at + 3]
        elif kind == layout.ARRIVE:
            counters[layout.BARRIERS] += 1
            store_release(plan[layout.MINE] + layout.BARRIER_LINE * layout.LINE_NBYTES, counters[layout.BARRIERS])
            at += 1
        elif kind == layout.SHARE_OUT:
            code = layout.SHARED_OUT
            at += 1
            break
        elif kind == layout.AWAIT:
            if not all_there(plan, layout.BARRIER_LINE * layout.LINE_NBYTES, counters[layout.BARRIERS], patient):
                code = layout.LATE_BARRIER
                break
            at += 1
        else:
            break
        phase = layout.DONE
    else:
        code = layout.UNFINISHED
    plan[layout.NEXT] = at
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
    head_nbytes = message[layout.HEAD_NBYTES]
    head = address + layout.HEAD * _WORD
    if not is_same(head + (head_nbytes + _WORD - 1) // _WORD * _WORD):
        return layout.MOVED
    stream = words(message[layout.STREAM])
    nbytes = message[layout.ARRAY_NBYTES]
    start = words(stream[layout.PUT_FLAG])[0]
    end = start + _WORD + head_nbytes + nbytes
    if stream[layout.PUTTING] or end > stream[layout.PUT_END]:
        return layout.UNFINISHED
    note = stream[layout.PUT_BASE] + start
    words(note)[0] = head_nbytes + nbytes
    copy(note + _WORD, head, head_nbytes)
    copy(note + _WORD + head_nbytes, message[layout.ARRAY], nbytes)
    store_release(stream[layout.PUT_FLAG], next_line(end))
    return layout.DONE


@compiled(types.int64(types.int64, types.int64))
def take(address, patient):
    """Take a note, of the head that is expected and an array, out of a stream, if one comes within moments."""
    message = words(address)
    head_nbytes = message[layout.HEAD_NBYTES]
    head = address + layout.HEAD * _WORD
    if not is_same(head + (head_nbytes + _WORD - 1) // _WORD * _WORD):
        return layout.MOVED
    stream = words(message[layout.STREAM])
    if stream[layout.TAKING] or stream[layout.ANNOUNCED] or stream[layout.TAKE_BASE] == 0:
        return layout.UNFINISHED
    start = stream[layout.TAKEN]
    polls = stream[layout.NOTE_POLLS if patient else layout.HELD_NOTE_POLLS]
    while load_acquire(stream[layout.COME_FLAG]) == start:
        if polls <= 0:
            return layout.NOTHING
        polls -= 1
        pause()
    nbytes = message[layout.ARRAY_NBYTES]
    note = stream[layout.TAKE_BASE] + start
    if words(note)[0] != head_nbytes + nbytes or not same_bytes(note + _WORD, head, head_nbytes):
        return layout.UNFINISHED
    copy(message[layout.ARRAY], note + _WORD + head_nbytes, nbytes)
    stream[layout.TAKEN] = next_line(start + _WORD + head_nbytes + nbytes)
    return layout.DONE
