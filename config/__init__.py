"""What the operator asked for (`Settings`) and what that means on this hardware with this model (`Plan`).

Imports no other room, and never torch unless a GPU has to be asked about. Knows nothing of HTTP or of a running batch.
"""
