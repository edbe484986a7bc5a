"""Islands that come and go, in processes: the driver of the members' protocol.

`member_driver.py` runs the state machine of `islands/membership` in a thread, `grace_windows.py`
says when it has waited long enough, `change_store.py` has the changes' bytes, and `change_merge.py`
merges them. `island_ranks.py` and `rank_merges.py` keep the processes of an island in step.
"""
