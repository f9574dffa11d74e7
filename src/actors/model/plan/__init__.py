"""Plans and engine jobs as frozen structs: they say what to compute, not how. Pure."""
