"""The commands of the command line, a file for each kind. Each file adds its own to the parser."""
