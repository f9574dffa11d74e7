"""The table writer: the timestamp oracle, group commit, and copies from files into tables."""
