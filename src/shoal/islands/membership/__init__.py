"""Membership of islands: members decide each turn's committers, divisor and next members.

`committed_turn.py` is the fact that they agree on, `turn_messages.py` what they send,
`commit_tally.py` the vote of all, `turn_chair.py` the vote of those that are left, and
`island_member.py` the state machine of one member. No clock, thread, socket or tensor.
"""
