"""How well a server does: fixed request sets, a client that drives them, and the figures.

A client only: knows nothing of the inside of any server and imports no other room.
"""
