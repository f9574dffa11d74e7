"""The compute half of a worker: its state machine (pure), and the actors' parts that run it."""
