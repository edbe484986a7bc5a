"""Watch of a run's ranks from outside: hangs, slow ranks, and ranks whose calls differ.

page_reader.py          reads the page of memory in which a rank reports what it is doing
hang_watch.py           reads all pages, and reports hangs
silence_deadlines.py    learns how long the phases of ranks may take
blamed_rank.py          finds the rank that keeps the others waiting
call_mismatch.py        ranks made different calls of a run
collective_mismatch.py  ranks made different collectives
unit_mismatch.py        ranks gathered different blocks
slow_ranks.py           one rank is slower than the others
remote_nodes.py         ranks of several machines, over a connection
"""
