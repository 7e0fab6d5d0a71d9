"""Turning a batch of token rows into logits and logits into tokens: loading, decoder, attention, kernels, sampling."""
