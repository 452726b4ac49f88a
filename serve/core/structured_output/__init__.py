"""Structured output: grammars that are compiled beside the loop, masks of allowed tokens, and thinking before both."""
