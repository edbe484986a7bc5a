"""Watch the ranks of a run from outside of them: who hangs, who is slow, whose calls differ.

page_reader.py         reads the page of memory in which a rank says what it is doing
watch_ranks.py         looks at all pages, and tells
deadlines.py           learns how long what ranks do may take
hung.py                who keeps the others waiting
unlike_calls.py        ranks made different calls of a run
unlike_collectives.py  ranks made different collectives
unit_calls.py          ranks gathered different blocks
slow.py                one rank is slower than the others
nodes.py               ranks of several machines, over a connection
"""
