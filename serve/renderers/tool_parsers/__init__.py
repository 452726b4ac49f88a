"""Parsers of tool calls: one engine for each syntax, one row of the registry for each model family."""
