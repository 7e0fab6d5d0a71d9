"""Attention over the paged KV memory, one backend a module, all behind `base.AttentionBackend`."""
