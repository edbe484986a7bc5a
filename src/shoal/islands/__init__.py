"""Islands: groups of processes that train alone, merge what they learnt, and train on.

Who sends what and how it is applied is a method (`methods/`, one file each); the exchange of one
part of the model, from the message to the vote, stands in `round_exchange.py`.
"""
