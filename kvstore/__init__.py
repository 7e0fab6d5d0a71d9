"""Where every key and value lives: page pool, page tables, radix tree. Knows pages and tokens, not their meaning."""
