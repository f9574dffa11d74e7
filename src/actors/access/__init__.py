"""Who may do what: roles, their proofs and their rights. Pure."""
