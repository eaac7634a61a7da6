"""Models to try things on: a Config and `from_config` each, no download."""
