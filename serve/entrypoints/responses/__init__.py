"""OpenAI Responses: items in, items out, kept under their ids."""
