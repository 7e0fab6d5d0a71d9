"""How the usual model families spell the end of a text or of a turn, for files that do not list all of theirs."""

END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
