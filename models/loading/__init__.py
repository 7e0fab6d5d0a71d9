"""From the MODEL argument to weights and a tokenizer, whatever the file format."""
