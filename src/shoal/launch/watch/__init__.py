"""Watch the ranks of a run from outside of them: who hangs, who is slow, whose calls differ.

page_reader.py         reads the page of memory in which a rank says what it is doing
hang_watch.py         looks at all pages, and tells
deadlines.py           learns how long what ranks do may take
blamed_rank.py                who keeps the others waiting
call_mismatch.py        ranks made different calls of a run
collective_mismatch.py  ranks made different collectives
unit_mismatch.py          ranks gathered different blocks
slow_ranks.py                one rank is slower than the others
remote_nodes.py               ranks of several machines, over a connection
"""
