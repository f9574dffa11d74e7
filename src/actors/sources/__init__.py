"""Sources: what brings changes in from outside, a kind a file. `source` says what one is."""
