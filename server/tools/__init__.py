"""Calls of a client's functions: how models write them, how they are made to, and how they are read."""
