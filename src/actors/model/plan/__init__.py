"""Plans and engine jobs as frozen structs: what to compute, never how. Pure."""
