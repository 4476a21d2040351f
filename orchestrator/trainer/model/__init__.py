"""Builds the model and its loss, and checks what a factory returns."""
