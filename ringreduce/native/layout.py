"""What the compiled function finds where: the fields of a plan, the steps of its programs, and what it returns.

A plan is an array of 64-bit integers: fields, line 0 of each other member's board in the order of members, and
programs, of which the number of a call chooses one. A program is a list of steps: each is a number of those below, and
what belongs to it. An address in a step is that number of bytes from a base, which is in its upper bits: 0, the call's
source, or its target.
"""

from __future__ import annotations

#: The mailboxes of a call, and so its program, depend on its number modulo this.
TURNS = 8
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
#: Bases of addresses: 0, the source and the target of the call.
BASES = 15
#: Where in the plan the program of each turn is.
PROGRAMS = 18
#: How many numbers this rank publishes from `SIGNATURE` on, and these.
PUBLISHES = PROGRAMS + TURNS
PUBLISHED = PUBLISHES + 1
#: The first of the addresses.
FIELDS = PUBLISHED + 7

#: So many bits of an address are bytes.
ADDRESS_BITS = 60
FROM_SOURCE = 1 << ADDRESS_BITS
FROM_TARGET = 2 << ADDRESS_BITS

#: The steps. The end of a program;
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

#: What the compiled function returns, and is called with: `DONE`, or where to go on.
DONE = 0
LATE_ENTRY = 1  # a member has not entered
LATE_BARRIER = 2  # a member has not reached the barrier
UNFINISHED = 3  # so that signals are heard
MISMATCH = 4  # a member calls something else
MOVED = 5  # the others' arrays are not where this plan has them; it may go on all the same
ABSENT = 6  # a member has detached

#: The lines of a board, see `ringreduce.transport.shared.board_memory`.
LINE_NBYTES = 64
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
