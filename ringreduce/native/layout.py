"""What the compiled function finds where: the fields of a plan, the instructions of its program, and what it returns.

A plan is an array of 64-bit integers: fields, line 0 of each other member's board in the order of members, and a
program. That is a list of instructions: each is a number of those below, and what belongs to it. An address in an
instruction is so many bytes from a base, which is in its upper bits.
"""

from __future__ import annotations

#: Of scratch in which sums grow: they stay in a core's first-level cache.
SCRATCH_NBYTES = 8192

#: How many members there are.
SIZE = 0
#: The address of line 0 of this rank's board, and of its own counters.
MINE = 1
COUNTERS = 2
#: The addresses of the functions of a `ringreduce.native.catalog.Kernel`, 0 for none; of scratch for sums that grow.
PAIR = 3
FINISH = 4
GROW = 5
ROUND = 6
SCRATCH = 7
#: How many bytes a number has, and by what sums are divided.
ITEMSIZE = 8
DIVISOR = 9
#: How often a wait polls while it holds the interpreter's lock; without it; and how often it then gives its core away.
HELD_POLLS = 10
POLLS = 11
YIELDS = 12
#: Whether the interpreter's lock is given back before anything is done.
RELEASES = 13
#: Where in the plan a call goes on that has returned something else than `DONE`.
NEXT = 14
#: Of the mailboxes of a call: the bytes of one, and how many take turns, of even and of odd calls; a power of two.
ROOM = 15
ROOMS = 16
#: The bases of addresses, by number.
BASES = 17
#: How many numbers this rank publishes from `SIGNATURE` on, and these.
PUBLISHES = 22
PUBLISHED = 23
#: How many copies for other ranks are still to go past the caches.
FAR = 30
#: The first of the addresses, and the program.
FIELDS = 31

#: So many bits of an address are bytes, and what is added to it for another base than 0: the source of the call, its
#: target, the mailbox whose turn it is, the entry line whose turn it is.
ADDRESS_BITS = 60
FROM_SOURCE = 1 << ADDRESS_BITS
FROM_TARGET = 2 << ADDRESS_BITS
FROM_MAILBOX = 3 << ADDRESS_BITS
FROM_LINE = 4 << ADDRESS_BITS

#: The instructions: eight. With a ninth, LLVM made a jump table, which led astray once the object file was loaded.
#: The end of a program;
END = 0
#: a copy: target, source, bytes;
COPY = 1
#: a reduction in the order of terms: how many numbers, how many terms, target, terms;
REDUCE = 2
#: the rendezvous: publish, wait for all, compare signatures;
ENTER = 3
#: whether numbers in memory are as expected: what to return if not, address, how many, and these;
EXPECT = 4
#: a flag that this rank has reached the next barrier; and the wait for all others.
ARRIVE = 5
AWAIT = 6
#: The call returns, and goes on behind this instruction once threads have carried out what belongs here.
SHARE_OUT = 7

#: What the compiled function returns, and is called with: `DONE`, or where to go on.
DONE = 0
LATE_ENTRY = 1  # a member has not entered
LATE_BARRIER = 2  # a member has not reached the barrier
UNFINISHED = 3  # so that signals are heard
MISMATCH = 4  # a member calls something else
MOVED = 5  # the others' arrays are not where this plan has them; it may go on all the same
ABSENT = 6  # a member has detached
SHARED_OUT = 7  # threads are to carry parts out

#: The lines and mailboxes of a board, see `ringreduce.transport.shared.board_memory`.
LINE_NBYTES = 64
MAILBOX_NBYTES = 4 << 20
BARRIER_LINE = 2
#: Fields of an entry line.
NUMBER = 0
SIGNATURE = 1
PLACES = 2
#: Counters of a rank, which only it reads: calls, barriers, and whether a compiled call has written the entry line of
#: even, and of odd calls.
CALLS = 0
BARRIERS = 1
WRITTEN = 2

#: A stream of notes, in both directions, see `ringreduce.transport.control`: the addresses of the flags that say how
#: many bytes were put here and there, and how many of those were taken;
PUT_FLAG = 0
COME_FLAG = 1
TAKEN = 2
#: where byte 0 of either direction were, did it lie where the buffer in use does, and where that buffer ends;
PUT_BASE = 3
PUT_END = 4
TAKE_BASE = 5
#: whether Python puts or takes just now, which a signal handler may have interrupted; how often a wait polls with the
#: interpreter's lock, and without.
PUTTING = 6
TAKING = 7
HELD_NOTE_POLLS = 8
NOTE_POLLS = 9
#: how many notes that were taken are still to be received: they come first.
ANNOUNCED = 10
STREAM_FIELDS = 11
#: A message whose array comes again: its stream, where the array is, its bytes, and those of the head of the note; the
#: head, in whole words; what `is_same` takes. It ends `DONE`, `MOVED` (the array is another one by now), or
#: `UNFINISHED`: Python sends or receives it; or nothing has come.
STREAM = 0
ARRAY = 1
ARRAY_NBYTES = 2
HEAD_NBYTES = 3
HEAD = 4
NOTHING = 8
