"""Islands: groups of processes that train alone, merge their changes, and train on.

A method (`methods/`, one file each) defines the messages and how islands apply them.
`round_exchange.py` exchanges one part of the model, from the message to the vote.
"""
