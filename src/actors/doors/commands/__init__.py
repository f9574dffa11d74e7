"""The command line. Each module holds a group of commands; `cli` assembles them."""
