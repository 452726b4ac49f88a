"""Layers of the decoder models."""
