"""What a compiled call finds where: the fields of a plan, and what it returns.

A plan is an array of 64-bit integers. After its fields come the addresses that depend on the number of ranks: line 0 of
each other member's board, in the order of members; then, by member, where the term is, and then where the result goes
(of a two-shot) or the first of its mailboxes (of a mailed call).
"""

from __future__ import annotations

#: Of scratch in which sums grow: they stay in a core's first-level cache.
SCRATCH_NBYTES = 8192

#: How many members there are, and which one this rank is.
SIZE = 0
INDEX = 1
#: The address of line 0 of this rank's board, and of its own counters.
MINE = 2
COUNTERS = 3
#: What it publishes: the hash of the signature, the places of its input and result.
CODE = 4
SOURCE = 5
TARGET = 6
#: The addresses of the functions of a `ringreduce.native.catalog.Kernel`, 0 for none; of scratch for sums that grow.
PAIR = 7
FINISH = 8
GROW = 9
END = 10
SCRATCH = 11
#: How many numbers this rank reduces, and how many bytes one has.
COUNT = 12
ITEMSIZE = 13
#: How often a wait polls while it holds the interpreter's lock; without it; and how often it then gives its core away.
HELD_POLLS = 14
POLLS = 15
YIELDS = 16
#: Whether the interpreter's lock is given back before anything is done.
RELEASES = 17
#: Of mailed calls: the bytes of a part of a mailbox, how many parts take turns, the bytes of a mailbox.
ROOM = 18
TURNS = 19
MAILBOX = 20
#: The first of the addresses. After those of a two-shot come the places of input and result that the others publish.
FIELDS = 21

#: What a compiled call returns. The first three are also what it is called with: where to go on.
DONE = 0
LATE_ENTRY = 1  # a member has not entered
LATE_BARRIER = 2  # a member has not reached the barrier
MISMATCH = 3  # a member calls something else
MOVED = 4  # a member's arrays are not where this plan has them

#: The lines of a board, see `ringreduce.transport.shared.board`.
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
