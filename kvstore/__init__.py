"""Where every key and value lives: page pool, page tables, radix tree. Knows page ids and tokens, not what they mean."""
