"""Checks that refuse a model, or a trace of it, that no stage could reproduce."""
