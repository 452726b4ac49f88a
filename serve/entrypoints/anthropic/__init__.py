"""The Messages API of Anthropic over the same turn that answers chat."""
