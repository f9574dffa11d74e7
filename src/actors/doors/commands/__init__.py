"""The command line, a group of commands a file: `cli` puts them together."""
