"""The native step: C++ kernels compiled for this machine, and the runner that calls them."""
