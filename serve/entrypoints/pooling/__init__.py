"""Endpoints of pooling models: embeddings, classes, scores, rankings."""
