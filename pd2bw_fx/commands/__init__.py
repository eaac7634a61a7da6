"""The commands of the command line, a file for each kind.

Each file adds its commands to the parser, and refuses options that cannot be. `work/` does what they ask. It
alone imports torch, which takes seconds: help and most mistakes are told without it.
"""
