"""What clients get back: bodies and stream chunks, built from plain dictionaries."""
