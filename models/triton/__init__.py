"""The CUDA kernels of --deterministic: what they give for a row does not depend on which rows share its step."""
