"""The servers that Octavo is compared with: how to install each, start it, and drive it with the same request sets."""
