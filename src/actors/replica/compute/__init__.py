"""The compute half of a worker: its state machine (pure), and the code that runs it in the
actor."""
